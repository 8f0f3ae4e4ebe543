"""Lightning callbacks that would silently change the experiment or its checkpoints."""

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError

PACKAGE = "lightning.pytorch.callbacks."
# Class -> why not, and what to do instead.
REFUSED = {
    "BatchSizeFinder": "would change the batch; set batch.micro_size=null or a size that fits",
    "GradientAccumulationScheduler": "would change the batch; set batch.micro_size instead",
    "LearningRateFinder": "would train outside the schedule; sweep optim.lr with --multirun",
    "ModelPruning": "renames weights, so no checkpoint fits; prune the trained model instead",
    "StochasticWeightAveraging": "replaces the schedule of optim; use EMAWeightAveraging",
}


def refuse_other_experiments(config: Config) -> None:
    """Raise a `UserError` for a Lightning callback that would change the experiment."""
    for name, node in config.callbacks.items():
        target = str(node.get("_target_", ""))
        class_name = target.removeprefix(PACKAGE)
        if target != class_name and class_name in REFUSED:
            raise UserError(f"callbacks.{name}: Lightning's {class_name} {REFUSED[class_name]}")
