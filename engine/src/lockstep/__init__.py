"""PyTorch Lightning on any number of devices, with the same results.

Each part works alone in a plain Lightning project; `help(lockstep.NAME)` explains it.
"""

import os
from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.batch import Batch
    from lockstep.building import build, instantiate_all
    from lockstep.callbacks.clipping import ClipAndSkip
    from lockstep.callbacks.counted_targets import CountTargets
    from lockstep.callbacks.guards import Guards
    from lockstep.callbacks.progress import Progress
    from lockstep.callbacks.seeds import MicroBatchSeeds
    from lockstep.callbacks.step_rate import StepRate
    from lockstep.callbacks.stopping import GracefulStop
    from lockstep.callbacks.validation import ValidateEvery
    from lockstep.checkpoints.callback import Checkpoints
    from lockstep.checkpoints.weights import load_weights
    from lockstep.launch.main import main
    from lockstep.loading.loaders import eval_loader, train_loader
    from lockstep.loading.order import Order
    from lockstep.memory.callback import StateInMemory
    from lockstep.metrics.callback import Metrics
    from lockstep.metrics.mean import Mean
    from lockstep.muon.optimizer import Muon
    from lockstep.ranks.ranks import Ranks
    from lockstep.run.run import Run
    from lockstep.schedule import Schedule, scaled_lr
    from lockstep.strategies.matrix_products import choose_matrix_products
    from lockstep.strategies.placing import ddp as DDP
    from lockstep.strategies.placing import fsdp2 as FSDP2
    from lockstep.strategies.placing import place
    from lockstep.versions import NUMERICS

# For GNU OpenMP, which reads it when torch is imported: a thread that waits for others leaves its
# core to other programs sooner. With its own value, 300,000, steps on a busy machine take many
# times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_PLACES = {
    "Batch": "lockstep.batch:Batch",
    "build": "lockstep.building:build",
    "Checkpoints": "lockstep.checkpoints.callback:Checkpoints",
    "choose_matrix_products": "lockstep.strategies.matrix_products:choose_matrix_products",
    "ClipAndSkip": "lockstep.callbacks.clipping:ClipAndSkip",
    "CountTargets": "lockstep.callbacks.counted_targets:CountTargets",
    "DDP": "lockstep.strategies.placing:ddp",
    "eval_loader": "lockstep.loading.loaders:eval_loader",
    "FSDP2": "lockstep.strategies.placing:fsdp2",
    "GracefulStop": "lockstep.callbacks.stopping:GracefulStop",
    "Guards": "lockstep.callbacks.guards:Guards",
    "instantiate_all": "lockstep.building:instantiate_all",
    "load_weights": "lockstep.checkpoints.weights:load_weights",
    "main": "lockstep.launch.main:main",
    "Mean": "lockstep.metrics.mean:Mean",
    "Metrics": "lockstep.metrics.callback:Metrics",
    "MicroBatchSeeds": "lockstep.callbacks.seeds:MicroBatchSeeds",
    "Muon": "lockstep.muon.optimizer:Muon",
    "NUMERICS": "lockstep.versions:NUMERICS",
    "Order": "lockstep.loading.order:Order",
    "place": "lockstep.strategies.placing:place",
    "Progress": "lockstep.callbacks.progress:Progress",
    "Ranks": "lockstep.ranks.ranks:Ranks",
    "Run": "lockstep.run.run:Run",
    "scaled_lr": "lockstep.schedule:scaled_lr",
    "Schedule": "lockstep.schedule:Schedule",
    "StateInMemory": "lockstep.memory.callback:StateInMemory",
    "StepRate": "lockstep.callbacks.step_rate:StepRate",
    "train_loader": "lockstep.loading.loaders:train_loader",
    "ValidateEvery": "lockstep.callbacks.validation:ValidateEvery",
}
__all__ = [
    "DDP",
    "FSDP2",
    "NUMERICS",
    "Batch",
    "Checkpoints",
    "ClipAndSkip",
    "CountTargets",
    "GracefulStop",
    "Guards",
    "Mean",
    "Metrics",
    "MicroBatchSeeds",
    "Muon",
    "Order",
    "Progress",
    "Ranks",
    "Run",
    "Schedule",
    "StateInMemory",
    "StepRate",
    "ValidateEvery",
    "build",
    "choose_matrix_products",
    "eval_loader",
    "instantiate_all",
    "load_weights",
    "main",
    "place",
    "scaled_lr",
    "train_loader",
]


__getattr__, __dir__ = lazily(__name__, _PLACES)
