"""Computes a micro-batch again, on another rank, and compares the bits."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor
from torchmetrics import Metric

from lockstep.callbacks.arithmetic import processor_of
from lockstep.callbacks.gradient_bits import (
    Bits,
    GradientBits,
    bits_of,
    refuse_changing_kernels,
    refuse_without_replicas,
)
from lockstep.callbacks.guards import refuse_differing_replicas
from lockstep.callbacks.seeds import leaf_seed, seed_device
from lockstep.errors import RunError, UserError
from lockstep.loading.loaders import TrainLoader
from lockstep.patches.torch import shallow_copy
from lockstep.ranks.ranks import from_each_rank, tensors_of_ranks
from lockstep.settings import check_whole
from lockstep.strategies.bit_sums import bit_sum


class Vote(NamedTuple):
    """The bits that a rank got for a micro-batch."""

    rank: int
    bits: tuple[int, ...]


class Replays(Callback):
    """Lets each rank compute the last micro-batch of its neighbor again, in random steps.

    Args:
        every: one step in this many.
        seed: decides in which steps; the same as that of `MicroBatchSeeds`.
    """

    def __init__(self, every: int, seed: int) -> None:
        check_whole("every", every, at_least=1)
        self.every = every
        self.seed = seed
        self._batch: Any = None  # the micro-batch to compare; None: this one isn't
        self._index = 0  # its number in the epoch
        self._loss: Any = None  # its loss, as Lightning has divided it
        self._factor: Tensor | None = None  # by which backward multiplied that

    def is_due(self, step: int) -> bool:
        """Return whether the step after `step` updates is one of those that are compared."""
        return leaf_seed(self.seed, step, -1) % self.every == 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what can't be computed again with equal bits."""
        refuse_without_replicas(trainer, "Replays")
        refuse_changing_kernels(pl_module)
        processors = from_each_rank(processor_of(pl_module.device))
        if len({*processors}) > 1:
            raise UserError(
                "the callback Replays compares ranks, and these have different processors "
                f"({'; '.join(sorted({*processors}))}); leave it out"
            )
        self._bits = GradientBits(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """In a step that is due, watch the last micro-batch."""
        del pl_module
        count = trainer.accumulate_grad_batches
        self._batch = None
        if batch_idx % count == count - 1 and self.is_due(trainer.global_step):
            self._batch = batch
            self._index = batch_idx
            self._bits.watch()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Note the loss, and by what backward multiplies its gradient."""
        if self._batch is None:
            return
        self._loss = loss.detach()

        def note(gradient: Tensor) -> None:
            self._factor = gradient

        loss.register_hook(note)  # type: ignore[no-untyped-call]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare, before the update, and end the run if any bit differs."""
        if self._batch is None:
            return
        assert self._factor is not None
        self._bits.stop()
        own_bits = tensors_of_ranks(self._bits.take(self._batch, self._loss))
        factors = tensors_of_ranks(self._factor)
        batches = Batches(trainer, self._batch)
        self._batch = None
        neighbor = (trainer.global_rank + 1) % trainer.world_size
        replay = self._compute(trainer, pl_module, batches, neighbor, factors)
        replays = tensors_of_ranks(replay).roll(1, 0)  # in the order of those computed again
        differs = (own_bits != replays).any(dim=1)  # (ranks,)
        if not differs.any():
            return
        step = trainer.global_step + 1
        refuse_differing_replicas(pl_module, step)
        rank = int(differs.nonzero()[0])
        # Both once more, and the others: most are right.
        again = tensors_of_ranks(self._compute(trainer, pl_module, batches, rank, factors))
        votes = [
            _vote(rank, own_bits[rank]),
            _vote((rank - 1) % trainer.world_size, replays[rank]),
            *(_vote(voter, bits) for voter, bits in enumerate(again)),
        ]
        names = [*self._bits.named]
        micro_batch = f"micro-batch {trainer.accumulate_grad_batches} of rank {rank}"
        raise RunError(f"step {step}: {micro_batch} {verdict(votes, names)}")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop watching."""
        if hasattr(self, "_bits"):
            self._bits.stop()

    def _compute(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batches: Batches,
        rank: int,
        factors: Tensor,
    ) -> Bits:
        """Compute the last micro-batch of a rank, without a trace in the module or gradients."""
        count = trainer.accumulate_grad_batches
        number = rank * count + count - 1
        device = pl_module.device
        batch = batches.of_rank(rank, number, device)
        seed_device(leaf_seed(self.seed, trainer.global_step, number), device)
        with unchanged(pl_module) as stand_in, trainer.precision_plugin.train_step_context():
            output: Any = stand_in.training_step(batch, self._index)
            loss = output["loss"] if isinstance(output, Mapping) else output
            loss = loss / count
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = scaler.scale(loss)
        weights = [*self._bits.named.values()]
        computed = torch.autograd.grad(loss, weights, factors[rank], allow_unused=True)
        gradients = cast(Sequence[Tensor | None], computed)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        sums = [zero if gradient is None else bit_sum(gradient) for gradient in gradients]
        return bits_of(batch, loss, sums)


class Batches:
    """The last micro-batches of all ranks.

    A `train_loader` reads them again: then what was read wrong is found, too.
    """

    def __init__(self, trainer: Any, own: Any) -> None:
        self._step = trainer.global_step
        self._strategy = trainer.strategy
        self._loader = trainer.train_dataloader
        self._of_ranks = []
        if not isinstance(self._loader, TrainLoader):
            host = torch.device("cpu")
            self._of_ranks = from_each_rank(move_data_to_device(own, host))

    def of_rank(self, rank: int, number: int, device: torch.device) -> Any:
        """Return the micro-batch of a rank, which is this one of the step."""
        if isinstance(self._loader, TrainLoader):
            batch = self._loader.read_again(self._step, number)
            return self._strategy.batch_to_device(batch, device)
        return move_data_to_device(self._of_ranks[rank], device)


@contextlib.contextmanager
def unchanged(module: LightningModule) -> Iterator[LightningModule]:
    """Give a stand-in for a module, whose steps leave no trace in it or in the log.

    It has the same weights, and attributes and metrics of its own, also lists and the like, to
    which a step may add; buffers are restored.
    """
    metrics = {
        name: copy.deepcopy(part)
        for name, part in module.named_children()
        if isinstance(part, Metric)
    }
    stand_in: Any = shallow_copy(module, metrics)
    stand_in.trainer = module.trainer
    own = vars(stand_in)
    containers = (list, dict, set, deque)
    own.update({name: copy.copy(it) for name, it in own.items() if isinstance(it, containers)})
    own["log"] = own["log_dict"] = lambda *_arguments, **_settings: None
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield stand_in
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _vote(rank: int, bits: Tensor) -> Vote:
    return Vote(rank, tuple(bits.tolist()))


def verdict(votes: list[Vote], names: list[str]) -> str:
    """Say where the bits differ, and which ranks are wrong, as the end of a sentence.

    Args:
        votes: first the bits in training, then those of the rank that computed them again.
        names: of the tensors, in the order of the model.
    """
    counts = Counter(vote.bits for vote in votes)
    bits, agreeing = counts.most_common(1)[0]
    other = next(vote for vote in votes if vote.bits != bits)
    wrong = sorted({vote.rank for vote in votes if vote.bits != bits})
    place = f"has other bits when computed again, first in {_first_difference(bits, other, names)}"
    if 2 * agreeing <= len(votes):
        return f"{place}, on rank {votes[1].rank}; either rank may be wrong: check both devices"
    return (
        f"{place}; rank {' and '.join(map(str, wrong))} got what {len(votes) - agreeing} of "
        f"{len(votes)} computations did: check that device"
    )


def _first_difference(bits: tuple[int, ...], other: Vote, names: list[str]) -> str:
    """Name what was computed first of what differs; backward begins at the last tensor."""
    same = [ours == theirs for ours, theirs in zip(bits, other.bits, strict=True)]
    if not same[0]:
        return "its batch"
    if not same[1]:
        return "the loss"
    differing = [name for name, is_same in zip(names, same[2:], strict=True) if not is_same]
    return f"the gradient of {differing[-1]}"
