"""`guard.verify_every`: computes a micro-batch again, on another rank, and compares the bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from lightning import Callback
from torch import Tensor

from lockstep_gpt.config import Config
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.distributed.bit_sums import bit_sum
from lockstep_gpt.distributed.ranks import from_each_rank, tensors_of_ranks
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.run.callbacks.arithmetic import processor_of
from lockstep_gpt.run.callbacks.guards import refuse_differing_replicas
from lockstep_gpt.training.gradient_bits import (
    Bits,
    GradientBits,
    bits_of,
    refuse_changing_kernels,
    refuse_without_replicas,
)
from lockstep_gpt.training.seeds import leaf_seed, seed_device


class Vote(NamedTuple):
    """The bits that a rank got for a micro-batch."""

    rank: int
    bits: tuple[int, ...]


class Replays(Callback):
    """Lets each rank compute the last micro-batch of its neighbor again, in random steps.

    Args:
        config: the seed decides in which steps.
        every: one step in this many.
    """

    def __init__(self, config: Config, every: int) -> None:
        self.config = config
        self.every = every
        self._batch: Any = None  # the micro-batch to compare; None: this one isn't
        self._factor: Tensor | None = None  # by which backward multiplied the loss

    def is_due(self, step: int) -> bool:
        """Return whether the step after `step` updates is one of those that are compared."""
        return leaf_seed(self.config.seed, step, -1) % self.every == 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse what can't be computed again with equal bits."""
        name = "guard.verify_every"
        refuse_without_replicas(trainer, name, self.every, "null")
        refuse_changing_kernels(self.config, pl_module)
        if not isinstance(trainer.datamodule, TokenDataModule):
            raise UserError(
                f"{name}={self.every} reads samples again, and a data module of your own gives "
                f"them once; set {name}=null"
            )
        processors = from_each_rank(processor_of(pl_module.device))
        if len({*processors}) > 1:
            raise UserError(
                f"{name}={self.every} compares ranks, and these have different processors "
                f"({'; '.join(sorted({*processors}))}); set {name}=null"
            )
        self._bits = GradientBits(pl_module.model)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """In a step that is due, watch the last micro-batch."""
        del pl_module
        count = trainer.accumulate_grad_batches
        self._batch = None
        if batch_idx % count == count - 1 and self.is_due(trainer.global_step):
            self._batch = batch
            self._bits.watch()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Note by what backward multiplies the gradient of the model's loss."""
        if self._batch is not None:
            count = trainer.accumulate_grad_batches  # by which Lightning has divided the loss

            scaler = getattr(trainer.precision_plugin, "scaler", None)

            def note(gradient: Tensor) -> None:
                if scaler is not None:  # Lightning has scaled the loss already
                    gradient = scaler.scale(gradient)
                self._factor = gradient / count

            loss.register_hook(note)  # type: ignore[no-untyped-call]

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Compare, before the update, and end the run if any bit differs."""
        if self._batch is None:
            return
        assert self._factor is not None
        self._bits.stop()
        own_loss = pl_module.losses.current[pl_module.leaf]
        own_bits = tensors_of_ranks(self._bits.take(self._batch, own_loss))
        self._batch = None
        factors = tensors_of_ranks(self._factor)
        neighbor = (trainer.global_rank + 1) % trainer.world_size
        replay = self._compute(trainer, pl_module, neighbor, factors)
        replays = tensors_of_ranks(replay).roll(1, 0)  # in the order of those computed again
        differs = (own_bits != replays).any(dim=1)  # (ranks,)
        if not differs.any():
            return
        step = trainer.global_step + 1
        refuse_differing_replicas(pl_module.model, step)
        rank = int(differs.nonzero()[0])
        # Both once more, and the others: most are right.
        again = tensors_of_ranks(self._compute(trainer, pl_module, rank, factors))
        votes = [
            _vote(rank, own_bits[rank]),
            _vote((rank - 1) % trainer.world_size, replays[rank]),
            *(_vote(voter, bits) for voter, bits in enumerate(again)),
        ]
        names = [*self._bits.named]
        micro_batch = f"micro-batch {trainer.accumulate_grad_batches} of rank {rank}"
        raise RunError(f"step {step}: {micro_batch} {verdict(votes, names)}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching."""
        if hasattr(self, "_bits"):
            self._bits.stop()

    def _compute(self, trainer: Any, pl_module: Any, rank: int, factors: Tensor) -> Bits:
        """Compute the last micro-batch of a rank, without a trace in the gradients."""
        count = trainer.accumulate_grad_batches
        number = rank * count + count - 1
        step = trainer.global_step
        device = pl_module.device
        tokens, targets = trainer.datamodule.micro_batch(step, number, device)
        seed_device(leaf_seed(self.config.seed, step, number), device)
        with trainer.precision_plugin.train_step_context():
            loss = pl_module.model(tokens, targets)
        weights = [*self._bits.named.values()]
        computed = torch.autograd.grad(loss, weights, factors[rank], allow_unused=True)
        gradients = cast(Sequence[Tensor | None], computed)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        sums = [zero if gradient is None else bit_sum(gradient) for gradient in gradients]
        return bits_of(tokens, targets, loss, sums)


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
        return "its tokens"
    if not same[1]:
        return "the loss"
    differing = [name for name, is_same in zip(names, same[2:], strict=True) if not is_same]
    return f"the gradient of {differing[-1]}"
