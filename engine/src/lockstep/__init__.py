"""PyTorch Lightning on any number of devices, with the same results.

Each part works alone in a plain Lightning project; `help(lockstep.NAME)` explains it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.batch import Batch as Batch
    from lockstep.building import build as build
    from lockstep.building import instantiate_all as instantiate_all
    from lockstep.callbacks.clipping import ClipAndSkip as ClipAndSkip
    from lockstep.callbacks.counted_targets import CountTargets as CountTargets
    from lockstep.callbacks.guards import Guards as Guards
    from lockstep.callbacks.progress import Progress as Progress
    from lockstep.callbacks.seeds import MicroBatchSeeds as MicroBatchSeeds
    from lockstep.callbacks.step_rate import StepRate as StepRate
    from lockstep.callbacks.stopping import GracefulStop as GracefulStop
    from lockstep.callbacks.validation import ValidateEvery as ValidateEvery
    from lockstep.checkpoints.callback import Checkpoints as Checkpoints
    from lockstep.checkpoints.weights import load_weights as load_weights
    from lockstep.launch.main import main as main
    from lockstep.loading.loaders import eval_loader as eval_loader
    from lockstep.loading.loaders import train_loader as train_loader
    from lockstep.loading.order import Order as Order
    from lockstep.memory.callback import StateInMemory as StateInMemory
    from lockstep.metrics.callback import Metrics as Metrics
    from lockstep.metrics.mean import Mean as Mean
    from lockstep.ranks.ranks import Ranks as Ranks
    from lockstep.run.run import Run as Run
    from lockstep.schedule import Schedule as Schedule
    from lockstep.schedule import scaled_lr as scaled_lr
    from lockstep.strategies.matrix_products import (
        choose_matrix_products as choose_matrix_products,
    )
    from lockstep.strategies.placing import place as place
    from lockstep.versions import NUMERICS as NUMERICS

# For GNU OpenMP, which reads it when torch is imported: a thread that waits for others leaves its
# core to other programs sooner. With its own value, 300,000, steps on a busy machine take many
# times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# Imported when first used: a command that only reports a mistake needs neither torch nor Lightning.
_MODULES = {
    "lockstep.batch": ("Batch",),
    "lockstep.building": ("build", "instantiate_all"),
    "lockstep.strategies.matrix_products": ("choose_matrix_products",),
    "lockstep.ranks.ranks": ("Ranks",),
    "lockstep.strategies.placing": ("place",),
    "lockstep.launch.main": ("main",),
    "lockstep.loading.loaders": ("eval_loader", "train_loader"),
    "lockstep.loading.order": ("Order",),
    "lockstep.checkpoints.callback": ("Checkpoints",),
    "lockstep.callbacks.guards": ("Guards",),
    "lockstep.memory.callback": ("StateInMemory",),
    "lockstep.metrics.callback": ("Metrics",),
    "lockstep.callbacks.progress": ("Progress",),
    "lockstep.callbacks.stopping": ("GracefulStop",),
    "lockstep.callbacks.validation": ("ValidateEvery",),
    "lockstep.metrics.mean": ("Mean",),
    "lockstep.run.run": ("Run",),
    "lockstep.checkpoints.weights": ("load_weights",),
    "lockstep.schedule": ("Schedule", "scaled_lr"),
    "lockstep.callbacks.clipping": ("ClipAndSkip",),
    "lockstep.callbacks.counted_targets": ("CountTargets",),
    "lockstep.callbacks.seeds": ("MicroBatchSeeds",),
    "lockstep.callbacks.step_rate": ("StepRate",),
    "lockstep.versions": ("NUMERICS",),
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
