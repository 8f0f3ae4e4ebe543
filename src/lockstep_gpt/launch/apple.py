"""Which runs use a Mac's GPU, and what it can't do."""

import os
import platform

from lockstep_gpt.config import Config
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.settings import check

PRECISIONS = ("32-true", "bf16-mixed")


def is_chosen(wanted: str) -> bool:
    """Return whether this `trainer.accelerator` selects an Apple GPU; reject a missing one."""
    # Lightning's rule; under Rosetta 2, the machine is x86_64.
    is_mac = platform.system() == "Darwin" and platform.machine() == "arm64"
    has_gpu = is_mac and os.environ.get("DISABLE_MPS") != "1"
    rule = "but there is no Apple GPU, or DISABLE_MPS=1 is set; set trainer=cpu"
    check("trainer.accelerator", wanted, has_gpu or wanted != "mps", rule)
    return has_gpu and wanted in ("auto", "gpu", "mps")


def refuse_impossible(config: Config, placement: Placement) -> None:
    """Raise a `UserError` for what an Apple GPU can't do."""
    rule = f"is not for Apple GPUs; set {' or '.join(PRECISIONS)}, or trainer=cpu"
    check("precision", config.precision, config.precision in PRECISIONS, rule)
    rule = "is not for Apple GPUs, for which Inductor is a prototype; set compile=false"
    check("compile", config.compile, not config.compile, rule)
    rule = "is not for Apple GPUs, whose fused kernels apply every update; set 0"
    check("guard.max_skipped", config.guard.max_skipped, not config.guard.max_skipped, rule)
    rule = "but an Apple GPU is one device; set trainer=cpu for several ranks"
    check("trainer.devices", placement.devices, placement.devices == 1, rule)
    check("trainer.num_nodes", placement.nodes, placement.nodes == 1, rule)
    target = str(config.strategy.get("_target_"))
    rule = "is for several devices, and an Apple GPU is one; set strategy=auto"
    check("strategy._target_", target, target.endswith(".strategies.auto"), rule)
