"""Settings that exclude each other, and settings that these devices can't do.

Both are checked once, in the parent, before anything is created or torch is imported.
"""

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import (
    refused_callbacks,
    targets,
    variables,
)
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.registry import CHECK, additions
from lockstep_gpt.settings import check

# `strategy._target_` of our choices. The module itself imports torch.
AUTO = "lockstep_gpt.distributed.strategies.auto"
DDP = "lockstep_gpt.distributed.strategies.ddp"
FSDP2 = "lockstep_gpt.distributed.strategies.fsdp2"
GROUPS_OF_GPT = ("model", "optim", "packing")
OF_GPT = ("batch.reference_size", "peak_tflops")


def refuse_conflicts(config: Config) -> None:
    """Raise a `UserError` for settings that can't be combined on any device."""
    targets.refuse_mistakes_in(config)
    refused_callbacks.refuse_other_experiments(config)
    for check_config in additions(CHECK):
        check_config(config)


def refuse_settings_of_gpt(config: Config, words: list[str]) -> None:
    """Raise a `UserError` for a typed setting of the GPT that a module of the user's ignores.

    What an experiment's file sets for the GPT is no mistake: it has no effect.

    Args:
        config: of the run.
        words: the command's overrides.
    """
    if config.trains_gpt:
        return
    target = config.module["_target_"]
    has_windows = config.tokens_per_sample is not None  # of our token data
    for word in words:
        name = word.lstrip("+~").partition("=")[0].partition("@")[0]
        of_windows = name == "model.block_size" or name.partition(".")[0] == "packing"
        is_of_gpt = name in OF_GPT or name.partition(".")[0] in GROUPS_OF_GPT
        if is_of_gpt and not (of_windows and has_windows):
            raise UserError(
                f"{word} is for module=gpt; {target} takes its own arguments, as module.NAME=VALUE"
            )


def refuse_impossible(config: Config, placement: Placement) -> None:
    """Raise a `UserError` for what these devices, or variables of this machine, can't do."""
    variables.refuse_absent_interfaces(placement)
    has_gpus = placement.accelerator == "cuda"
    uses = f"but this run uses {placement.accelerator}"
    rule = f"needs a GPU, {uses}; set precision=bf16-mixed or 32-true"
    check("precision", config.precision, has_gpus or config.precision != "16-mixed", rule)
