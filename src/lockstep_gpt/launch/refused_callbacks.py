"""Lightning callbacks, or their arguments, that can't work here."""

import difflib
import logging
import os

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.metrics_rows import COLUMNS

logger = logging.getLogger(__name__)

PACKAGE = "lightning.pytorch.callbacks."
# What a callback can monitor on any device; the Trainer knows steps and tokens by other names.
METRICS = [name for name in COLUMNS if not name.startswith("trainer/") and name != "throughput/mfu"]
SIMILAR = 0.65  # as `loss` and `val/loss` are; at 0.6, names of other metrics would match, too
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
        monitor = node.get("monitor")
        target = str(node.get("_target_", ""))
        class_name = target.rpartition(".")[2]
        if target.startswith(PACKAGE) and class_name in REFUSED:
            raise UserError(f"callbacks.{name}: Lightning's {class_name} {REFUSED[class_name]}")
        if target.startswith(PACKAGE) and class_name == "EarlyStopping" and monitor is None:
            raise UserError(
                f"callbacks.{name}: Lightning's EarlyStopping lacks a metric; set "
                f"+callbacks.{name}.monitor=val/loss, or another one: {', '.join(METRICS)}"
            )
        if monitor is not None:
            _warn_of_other_names_of_metrics(name, str(monitor))


def _warn_of_other_names_of_metrics(name: str, monitor: str) -> None:
    """Warn of `val_loss`, for example, unless the user's code logs a metric of that name."""
    near = difflib.get_close_matches(monitor.replace("_", "/", 1), METRICS, n=1, cutoff=SIMILAR)
    if near and monitor not in COLUMNS and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "callbacks.%s.monitor=%s: ours is %s; unless your code logs %s, the run will fail "
            "when the callback needs it",
            *(name, monitor, near[0], monitor),
        )
