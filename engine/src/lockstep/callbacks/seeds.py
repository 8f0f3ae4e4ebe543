"""The random seed of a micro-batch: a function of the run's seed, the step, and its index."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer

from lockstep.loading.data_place import data_place


class MicroBatchSeeds(Callback):
    """Makes dropout depend only on seed, step, and micro-batch, not on the rank.

    It seeds the global generators of torch, NumPy, and Python before each `training_step`. So
    another number of ranks draws the same noise if its micro-batches have the same size, as a
    `Batch` with a `micro_size` has. Ranks that split the model also draw the same noise for their
    common residual stream.

        >>> trainer = Trainer(callbacks=[lockstep.MicroBatchSeeds(seed=1337)])

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seed this rank's device, and the host's generators."""
        leaf = leaf_of(trainer, batch_idx)
        seed = leaf_seed(self.seed, trainer.global_step, leaf)
        seed_device(seed, pl_module.device)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that mixing of samples uses)
        random.seed(seed)


def leaf_of(trainer: Trainer, batch_idx: int) -> int:
    """Return the index of this rank's micro-batch among those of a step over all ranks."""
    accumulation = trainer.accumulate_grad_batches
    return data_place(trainer).rank * accumulation + batch_idx % accumulation


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the host's generator and that of `device`, if it has its own.

    `torch.manual_seed` takes a millisecond if device types are missing: for each, it records the
    call with the whole stack as text.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def leaf_seed(seed: int, step: int, leaf: int) -> int:
    """Return 63 bits that depend on all three; `leaf` counts a step's micro-batches over ranks."""
    digest = hashlib.blake2b(f"{seed} {step} {leaf}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
