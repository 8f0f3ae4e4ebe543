"""Check before torch is imported where gradients can be compressed."""

from lockstep_gpt.config import Config, check
from lockstep_gpt.launch.devices import accelerator_of


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` for a `strategy.comm_hook` that does not work with the settings."""
    backend, hook = (config.strategy.get(name) for name in ("process_group_backend", "comm_hook"))
    gpus = accelerator_of(config.trainer.get("accelerator", "auto")) == "cuda"
    fits = hook != "bf16" or (gpus and backend in (None, "nccl"))
    rule = "needs GPUs and NCCL; set strategy.comm_hook=fp16 or none"
    check("strategy.comm_hook", hook, fits, rule)
    fits = hook != "powersgd" or not config.launch.max_restarts
    rule = "keeps an error memory that no checkpoint contains; set launch.max_restarts=0"
    check("strategy.comm_hook", hook, fits, rule)
