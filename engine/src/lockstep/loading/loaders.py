"""Loaders that give any map-style dataset the promise: the same samples on any number of devices.

In a LightningDataModule:

    def train_dataloader(self):
        return train_loader(self.train, self.batch, self.trainer, seed=1, workers=4)

    def val_dataloader(self):
        return eval_loader(self.val, self.batch, self.trainer, workers=4)
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any, Literal, Protocol

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from lockstep.errors import UserError
from lockstep.loading import worker_processes
from lockstep.loading.data_place import DataPlace, data_place
from lockstep.loading.feeding import Feed, groups_of
from lockstep.loading.order import (
    HasPast,
    Order,
    Places,
    RankOrder,
    Shuffled,
    eval_parts,
)
from lockstep.loading.reading import BatchReader, Collate, Pad
from lockstep.settings import check

Workers = int | Literal["thread"]

PAST = "past"  # the name by which a data module saves what has decided its order
EVAL_SEED = "evaluation"  # the random numbers of a sample are the same in each evaluation


class Sized(Protocol):
    """What knows how a step's samples are spread."""

    @property
    def micro_size(self) -> int:
        """Samples of a micro-batch on one device."""


class TrainLoader(Iterable[Any]):
    """Micro-batches of this rank, an epoch of them from the Trainer's step on; see `train_loader`.

    Attributes:
        waited: seconds that the consumer has waited for batches so far.
    """

    def __init__(
        self,
        batches: "Batches",
        trainer: Trainer,
        micro_size: int,
        size: int | None,
        order: Order,
    ) -> None:
        self.batches = batches
        self.trainer = trainer
        self.micro_size = micro_size
        self.size = size  # samples of an epoch; None: it has no end
        self.order = order
        self.waited = 0.0
        self._saved = {"step": 0, "samples": 0}  # of a checkpoint

    def samples_seen(self, step: int) -> int:
        """Return how many samples all ranks together have seen up to optimizer step `step`."""
        return self._saved["samples"] + (step - self._saved["step"]) * self.samples_per_step

    def _position(self, step: int) -> int:
        """Return the position at which the samples of the update after `step` begin.

        With `overfit_batches`, each epoch has the first micro-batches of the run again.
        """
        if not getattr(self.trainer, "overfit_batches", 0):  # its class doesn't declare it
            return self.samples_seen(step)
        steps = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        return step % steps * self.samples_per_step

    @property
    def samples_per_step(self) -> int:
        """The samples of an optimizer step over all ranks."""
        return samples_per_step(self.trainer, self.micro_size)

    def __len__(self) -> int:
        """Return the micro-batches of an epoch of the Trainer, which consists of whole steps.

        Samples that are left over begin the next one.
        """
        if self.size is None:
            raise TypeError("a loader without epochs has no length")
        steps = max(1, self.size // self.samples_per_step)
        return steps * self.trainer.accumulate_grad_batches

    def __iter__(self) -> Iterator[Any]:
        place = data_place(self.trainer)
        accumulation = self.trainer.accumulate_grad_batches
        places = RankOrder(
            self.order,
            self.micro_size,
            place.rank,
            place.size,
            accumulation,
            self._position(self.trainer.global_step),
        )
        # Lightning counts, and takes fewer of them to end an epoch that is resumed.
        count = None if self.size is None else len(self)
        batches = self.batches.of(islice(places, count))
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - started
            self._refuse_other_steps(accumulation)
            yield batch

    def _refuse_other_steps(self, accumulation: int) -> None:
        """Raise a `UserError` if a callback has changed what a step is, maybe on one rank only."""
        now = self.trainer.accumulate_grad_batches
        check(
            "accumulate_grad_batches",
            now,
            now == accumulation,
            f"was {accumulation} when this epoch began; a step has the same samples only if no "
            "callback changes it",
        )

    def read_again(self, step: int, number: int) -> Any:
        """Return a micro-batch once more: the one of this number after `step` updates.

        Numbers count the micro-batches of a step over all ranks.
        """
        first = self._position(step) + number * self.micro_size
        positions = first + np.arange(self.micro_size)
        return self.batches.reader.__getitems__(Places(first, self.order(positions)))

    def state_dict(self) -> dict[str, int]:
        """Return where the run is; Lightning saves it in checkpoints."""
        step = self.trainer.global_step
        return {"step": step, "samples": self.samples_seen(step)}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue there, also with another number of samples in each step."""
        self._saved = dict(state_dict)


class EvalLoader(Iterable[Any]):
    """Batches of this rank, which contain each sample once over all ranks; see `eval_loader`."""

    def __init__(self, batches: "Batches", places: Sequence[Places]) -> None:
        self.batches = batches
        self.places = places

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.places)

    def __iter__(self) -> Iterator[Any]:
        return self.batches.of(self.places)


class Joined(Iterable[Any]):
    """The batches of several loaders, one after another."""

    def __init__(self, loaders: Sequence[EvalLoader]) -> None:
        self.loaders = loaders

    def __len__(self) -> int:
        """Return the number of batches."""
        return sum(map(len, self.loaders))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.loaders)


def train_loader(
    dataset: Any,
    batch: Sized | int,
    trainer: Trainer | None,
    *,
    seed: int,
    order: Order | None = None,
    collate: Collate = default_collate,
    workers: Workers = 0,
    endless: bool = False,
) -> TrainLoader:
    """Return the training data of this rank, for a data module's `train_dataloader`.

    The samples of a step are a function of seed and step: the same on any number of ranks with the
    same global batch, and after a restart at any step. So is each sample, whose random numbers
    depend on seed and position in the run, if it draws them from the global generators of torch,
    NumPy, or Python. An epoch of the Trainer consists of whole steps; samples that are left over
    begin the next one.

        >>> loader = lockstep.train_loader(range(6), 2, Trainer(), seed=1)
        >>> [batch.tolist() for batch in loader]
        [[0, 5], [4, 2], [3, 1]]

    Args:
        dataset: has `__len__` and `__getitem__`, and may have torch's `__getitems__`, which reads
            many samples at once.
        batch: the samples of a micro-batch, or what has a `micro_size`.
        trainer: of the data module; it knows rank, step, and accumulation.
        seed: of the order, and of random numbers.
        order: returns the samples at positions of the run; default: each epoch has its own order.
        collate: makes a batch of samples.
        workers: processes that read ahead; 0: this one reads when it needs a batch. `thread`: a
            thread of this process reads ahead, for datasets that draw no random numbers and leave
            Python's lock, as copies by NumPy do. A process may, very rarely, hang when it starts
            on Python 3.11.0 to 3.11.9 (https://github.com/python/cpython/issues/112275).
        endless: let the data have no epochs.

    Raises:
        UserError: the dataset isn't map-style, or is empty, there is no Trainer yet, its strategy
            can't add gradients as `batch` says, or it counts epochs of data that has no end.
    """
    trainer = attached(trainer)
    _refuse_other_sums(trainer, batch)
    if endless:
        _refuse_epochs(trainer)
    size = size_of(dataset)
    return TrainLoader(
        Batches(BatchReader(dataset, seed, collate), trainer.strategy, workers),
        trainer,
        micro_size_of(batch),
        None if endless else size,
        order or Shuffled(size, seed),
    )


def _refuse_epochs(trainer: Trainer) -> None:
    """Raise a `UserError` for arguments of a Trainer that mean nothing without an end of epochs.

    A Trainer would reject a part of an epoch with a traceback, and count no epochs in silence.
    """
    settings = vars(trainer)
    for name, instead in (("overfit_batches", ""), ("limit_train_batches", "max_steps, or ")):
        value = settings.get(name)
        is_part = isinstance(value, float) and value not in (0.0, 1.0)
        rule = f"is a part of an epoch, but this data has no end; set {instead}a number of "
        rule += "micro-batches"
        check(f"trainer.{name}", value, not is_part, rule)
    if isinstance(settings.get("limit_train_batches"), int) or trainer.max_steps < 0:
        return
    rule = "counts epochs, but this data has no end; set max_steps, or add "
    rule += "trainer.limit_train_batches=MICRO_BATCHES"
    for name, epochs, usual in (
        ("max_epochs", trainer.max_epochs, -1),
        ("min_epochs", trainer.min_epochs, 1),
    ):
        check(f"trainer.{name}", epochs, epochs is None or epochs <= usual, rule)


def _refuse_other_sums(trainer: Trainer, batch: Sized | int) -> None:
    """Raise a `UserError` if a batch needs exact sums, and the strategy adds in its own order."""
    is_exact = getattr(batch, "is_exact", False)
    if is_exact and getattr(trainer.strategy, "exact_threads", None) is None:
        raise UserError(
            f"batch.exact_micro_size is set, and {type(trainer.strategy).__name__} adds gradients "
            "in an order of its own; use lockstep.DDP(batch), which strategy=ddp is"
        )


def eval_loader(
    dataset: Any,
    batch: Sized | int,
    trainer: Trainer | None,
    *,
    pad: Pad | None = None,
    collate: Collate = default_collate,
    workers: Workers = 0,
) -> EvalLoader:
    """Return this rank's part of a validation or a test, for a data module's `val_dataloader`.

    Each sample is in one batch of one rank, and draws the same random numbers in each evaluation.

        >>> loader = lockstep.eval_loader([0, 1, 2], 2, Trainer())
        >>> [batch.tolist() for batch in loader]
        [[0], [1, 2]]

    Args:
        dataset: as for `train_loader`.
        batch: the most samples of a batch, or what has a `micro_size`.
        trainer: of the data module; it knows the rank.
        pad: lets rows count nothing, so that all batches have one shape, as compiled models want:
            it gets a batch whose rows from `real` on repeat another, and `real`. Default: batches
            have fewer rows where samples run out.
        collate: as for `train_loader`.
        workers: as for `train_loader`.

    Raises:
        UserError: the dataset isn't map-style, or too small for these ranks.
    """
    trainer = attached(trainer)
    place = data_place(trainer)
    places = eval_places(
        size_of(dataset),
        micro_size_of(batch),
        place,
        is_padded=pad is not None,
        is_exact=getattr(trainer.strategy, "exact_threads", None) is not None,
    )
    reader = BatchReader(dataset, EVAL_SEED, collate, pad)
    return EvalLoader(Batches(reader, trainer.strategy, workers), places)


def eval_places(
    size: int, micro_size: int, place: DataPlace, *, is_padded: bool, is_exact: bool
) -> list[Places]:
    """Return the samples of each batch of a rank; -1 is padding.

    Args:
        size: samples of the dataset.
        micro_size: most samples of a batch.
        place: of the rank.
        is_padded: whether all batches have `micro_size` rows, and all ranks the same number.
        is_exact: whether batches must be the same for any number of ranks.
    """
    parts = eval_parts(size, micro_size, *place, whole=is_padded or is_exact)
    rows = [np.arange(part.first, part.end) for part in parts]
    if is_padded:
        nothing = np.zeros(0, np.int64)
        rows += [nothing] * (-(-size // (micro_size * place.size)) - len(rows))
        rows = [np.pad(row, (0, micro_size - len(row)), constant_values=-1) for row in rows]
    elif min(size, -(-size // micro_size) if is_exact else size) < place.size:
        raise UserError(
            f"{size} samples to evaluate, in batches of {micro_size}, are too few for {place.size} "
            "ranks; use fewer devices, smaller batches, or give eval_loader a pad"
        )
    return [Places(int(row[0]), row) for row in rows]


def samples_per_step(trainer: Trainer, micro_size: int) -> int:
    """Return the samples of an optimizer step over all ranks."""
    return micro_size * data_place(trainer).size * trainer.accumulate_grad_batches


def batch_size_of(loader: Any) -> int | None:
    """Return the samples of a loader's batches, ours or torch's; None if it doesn't tell."""
    if isinstance(loader, TrainLoader):
        return loader.micro_size
    for part in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def samples_of_run(trainer: Trainer | None, batch: Sized | int) -> int:
    """Return the samples of all steps of a run, for a data module."""
    trainer = attached(trainer)
    return trainer.max_steps * samples_per_step(trainer, micro_size_of(batch))


def past_of(trainer: Trainer | None) -> dict[str, Any]:
    """Return, for a data module's `state_dict`, what has decided a run's samples so far."""
    loader = None if trainer is None else trainer.train_dataloader
    order: Any = getattr(loader, "order", None)
    if not isinstance(loader, TrainLoader) or not isinstance(order, HasPast):
        return {}
    return {PAST: order.past(loader.samples_seen(loader.trainer.global_step))}


def refuse_other_past(order: Any, state_dict: dict[str, Any]) -> None:
    """Raise a `UserError` if an order would have come to a saved state otherwise."""
    if PAST in state_dict and isinstance(order, HasPast):
        order.refuse_other_past(state_dict[PAST])


def attached(trainer: Trainer | None) -> Trainer:
    """Return the Trainer, or raise a `UserError` if a data module has none yet."""
    if trainer is None:
        raise UserError(
            "a loader needs the Trainer, which knows rank and step; give the data module to "
            "trainer.fit, which calls train_dataloader"
        )
    return trainer


def size_of(dataset: Any) -> int:
    """Return the number of samples, or raise a `UserError` if there is none."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UserError(
            f"{name} has no numbered samples; give it __len__ and __getitem__, or return torch's "
            "DataLoader, whose order and restarts are then up to it"
        )
    size = len(dataset)
    if size == 0:
        raise UserError(f"{name} has no samples; give it at least one")
    return size


def micro_size_of(batch: Sized | int) -> int:
    """Return the samples of a micro-batch, or raise a `UserError` if there are none."""
    size = batch if isinstance(batch, int) else batch.micro_size
    if size < 1:
        raise UserError(f"a micro-batch of {size} samples is too small; use at least 1")
    return size


class Batches:
    """Reads the batches of one rank ahead, as `workers` says."""

    def __init__(self, reader: BatchReader, strategy: Strategy, workers: Workers) -> None:
        if workers != "thread" and workers < 0:
            raise UserError(f"workers={workers} must be thread, or at least 0")
        self.reader = reader
        self.strategy = strategy
        self.workers = workers
        self._places: Iterable[Places] = ()  # what worker processes read
        self._loader: DataLoader[Any] | None = None  # whose workers live on between iterations

    def of(self, places: Iterable[Places]) -> Iterator[Any]:
        """Yield the batches at these places."""
        if self.workers == "thread":
            return iter(Feed(self._pinned(self._read_groups(places))))
        if self.workers == 0:
            return self._pinned(map(self.reader.__getitems__, places))
        self._places = places
        if self._loader is None:
            self._loader = DataLoader(
                InWorker(self.reader),
                batch_sampler=self,
                num_workers=self.workers,
                collate_fn=as_it_is,
                pin_memory=self._is_pinned,
                persistent_workers=True,
                worker_init_fn=partial(worker_processes.begin, os.getpid()),
                generator=torch.Generator(),  # the global one is training's
            )
        return iter(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield what worker processes read, as a batch sampler of torch does."""
        return ((places.first, places.samples.tobytes()) for places in self._places)

    def _read_groups(self, places: Iterable[Places]) -> Iterator[Any]:
        for group in groups_of(places):
            yield from self.reader.read_group(group)

    @property
    def _is_pinned(self) -> bool:
        return self.strategy.root_device.type == "cuda"

    def _pinned(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return batches in memory from which a GPU copies while the host continues."""
        if not self._is_pinned:
            return batches
        return (apply_to_collection(batch, Tensor, Tensor.pin_memory) for batch in batches)


class InWorker(Dataset[Any]):
    """Reads what `Batches` sends to a worker process; bytes are faster to send than arrays."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitems__(self, message: tuple[int, bytes]) -> Any:
        """Return a micro-batch."""
        first, samples = message
        return self.reader.__getitems__(Places(first, np.frombuffer(samples, np.int64)))


def as_it_is(batch: Any) -> Any:
    """Return a batch that is made already."""
    return batch
