"""Lightning callbacks that can't work here."""

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError

PACKAGE = "lightning.pytorch.callbacks."
# Class -> why not, and what to do instead.
REFUSED = {
    "BackboneFinetuning": "needs a module with a backbone; freeze weights in model/ instead",
    "BaseFinetuning": "does nothing by itself; name your own subclass",
    "BasePredictionWriter": "writes predictions, but training makes none; use evaluate",
    "BatchSizeFinder": "would change the batch; set batch.micro_size=null or a size that fits",
    "GradientAccumulationScheduler": "would change the batch; set batch.micro_size instead",
    "LearningRateFinder": "would train outside the schedule; sweep optim.lr with --multirun",
    "ModelPruning": "renames weights, so no checkpoint fits; prune the trained model instead",
    "StochasticWeightAveraging": "replaces the schedule of optim; use EMAWeightAveraging",
}


def refuse_what_cannot_work(config: Config) -> None:
    """Raise a `UserError` for a Lightning callback that can't work here."""
    for name, node in config.callbacks.items():
        target = str(node.get("_target_", ""))
        class_name = target.rpartition(".")[2]
        if target.startswith(PACKAGE) and class_name in REFUSED:
            raise UserError(f"callbacks.{name}: Lightning's {class_name} {REFUSED[class_name]}")
