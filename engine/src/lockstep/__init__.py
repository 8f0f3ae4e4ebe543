"""PyTorch Lightning on any number of devices, with the same results.

Each part works alone in a plain Lightning project; `help(lockstep.NAME)` explains it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep_gpt.batch import Batch as Batch
    from lockstep_gpt.building import build as build
    from lockstep_gpt.building import instantiate_all as instantiate_all
    from lockstep_gpt.distributed.matrix_products import (
        choose_matrix_products as choose_matrix_products,
    )
    from lockstep_gpt.distributed.ranks import Ranks as Ranks
    from lockstep_gpt.distributed.strategies import place as place
    from lockstep_gpt.launch.main import main as main
    from lockstep_gpt.loading.loaders import eval_loader as eval_loader
    from lockstep_gpt.loading.loaders import train_loader as train_loader
    from lockstep_gpt.loading.order import Order as Order
    from lockstep_gpt.run.callbacks.checkpoints import Checkpoints as Checkpoints
    from lockstep_gpt.run.callbacks.guards import Guards as Guards
    from lockstep_gpt.run.callbacks.memory import StateInMemory as StateInMemory
    from lockstep_gpt.run.callbacks.metrics import Metrics as Metrics
    from lockstep_gpt.run.callbacks.progress import Progress as Progress
    from lockstep_gpt.run.callbacks.stopping import GracefulStop as GracefulStop
    from lockstep_gpt.run.callbacks.validation import ValidateEvery as ValidateEvery
    from lockstep_gpt.run.means import Mean as Mean
    from lockstep_gpt.run.run import Run as Run
    from lockstep_gpt.run.weights import load_weights as load_weights
    from lockstep_gpt.schedule import Schedule as Schedule
    from lockstep_gpt.schedule import scaled_lr as scaled_lr
    from lockstep_gpt.training.clipping import ClipAndSkip as ClipAndSkip
    from lockstep_gpt.training.counted_targets import CountTargets as CountTargets
    from lockstep_gpt.training.seeds import MicroBatchSeeds as MicroBatchSeeds
    from lockstep_gpt.training.step_rate import StepRate as StepRate

# Imported when first used: a command that only reports a mistake needs neither torch nor Lightning.
_MODULES = {
    "lockstep_gpt.batch": ("Batch",),
    "lockstep_gpt.building": ("build", "instantiate_all"),
    "lockstep_gpt.distributed.matrix_products": ("choose_matrix_products",),
    "lockstep_gpt.distributed.ranks": ("Ranks",),
    "lockstep_gpt.distributed.strategies": ("place",),
    "lockstep_gpt.launch.main": ("main",),
    "lockstep_gpt.loading.loaders": ("eval_loader", "train_loader"),
    "lockstep_gpt.loading.order": ("Order",),
    "lockstep_gpt.run.callbacks.checkpoints": ("Checkpoints",),
    "lockstep_gpt.run.callbacks.guards": ("Guards",),
    "lockstep_gpt.run.callbacks.memory": ("StateInMemory",),
    "lockstep_gpt.run.callbacks.metrics": ("Metrics",),
    "lockstep_gpt.run.callbacks.progress": ("Progress",),
    "lockstep_gpt.run.callbacks.stopping": ("GracefulStop",),
    "lockstep_gpt.run.callbacks.validation": ("ValidateEvery",),
    "lockstep_gpt.run.means": ("Mean",),
    "lockstep_gpt.run.run": ("Run",),
    "lockstep_gpt.run.weights": ("load_weights",),
    "lockstep_gpt.schedule": ("Schedule", "scaled_lr"),
    "lockstep_gpt.training.clipping": ("ClipAndSkip",),
    "lockstep_gpt.training.counted_targets": ("CountTargets",),
    "lockstep_gpt.training.seeds": ("MicroBatchSeeds",),
    "lockstep_gpt.training.step_rate": ("StepRate",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*sorted(_PLACES)]
