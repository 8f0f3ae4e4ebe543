"""Lightning callbacks, or their arguments, that can't work here."""

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.metrics_rows import COLUMNS

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
        _refuse_other_names_of_metrics(name, node.get("monitor"))
        target = str(node.get("_target_", ""))
        class_name = target.rpartition(".")[2]
        if target.startswith(PACKAGE) and class_name in REFUSED:
            raise UserError(f"callbacks.{name}: Lightning's {class_name} {REFUSED[class_name]}")


def _refuse_other_names_of_metrics(name: str, monitor: object) -> None:
    """Raise a `UserError` for `val_loss`, for example, which would only fail at a validation."""
    for metric in COLUMNS:
        if monitor == metric.replace("/", "_"):
            rule = f"is no metric; did you mean {metric}?"
            raise UserError(f"callbacks.{name}.monitor={monitor} {rule}")
