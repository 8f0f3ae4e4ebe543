"""Which runs use a Mac's GPU, and what it can't do; checked before torch is imported."""

import os
import platform

from lockstep_gpt.config import Config, UserError, check
from lockstep_gpt.launch.devices import is_inside_launcher

PRECISIONS = ("32-true", "bf16-mixed")


def accelerator(wanted: str) -> str | None:
    """Return `mps` if a `trainer.accelerator` means an Apple GPU here; reject a missing one."""
    # Lightning's rule; under Rosetta 2, the machine is x86_64.
    is_mac = platform.system() == "Darwin" and platform.machine() == "arm64"
    here = is_mac and os.environ.get("DISABLE_MPS") != "1"
    rule = "but there is no Apple GPU, or DISABLE_MPS=1 is set; set trainer=cpu"
    check("trainer.accelerator", wanted, here or wanted != "mps", rule)
    return "mps" if here and wanted in ("auto", "gpu", "mps") else None


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` for what an Apple GPU can't do, if this run uses one."""
    trainer = config.trainer
    if accelerator(trainer.get("accelerator", "auto")) != "mps":
        return
    rule = f"is not for Apple GPUs; set {' or '.join(PRECISIONS)}, or trainer=cpu"
    check("precision", config.precision, config.precision in PRECISIONS, rule)
    rule = "is not for Apple GPUs, for which Inductor is a prototype; set compile=false"
    check("compile", config.compile, not config.compile, rule)
    rule = "is not for Apple GPUs, whose fused kernels apply every update; set 0"
    skipped = config.guard.max_skipped
    check("guard.max_skipped", skipped, not skipped, rule)
    rule = "but an Apple GPU is one device; set trainer=cpu for several ranks"
    check("trainer.devices", trainer.get("devices"), trainer.get("devices") in ("auto", 1), rule)
    check("trainer.num_nodes", trainer.get("num_nodes"), trainer.get("num_nodes", 1) == 1, rule)
    if is_inside_launcher() and os.environ["WORLD_SIZE"] != "1":
        raise UserError(f"a launcher started {os.environ['WORLD_SIZE']} ranks, {rule}")
    target = str(config.strategy.get("_target_"))
    rule = "is for several devices, and an Apple GPU is one; set strategy=auto"
    check("strategy._target_", target, target.endswith(".strategies.auto"), rule)
