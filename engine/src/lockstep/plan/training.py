"""What is trained, in plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.muon.optimizer import Muon
from lockstep.plan.counting import Loss, copied, flops_per_sample, loss_of, moment_bytes
from lockstep.plan.sharing import Ownership, Sharing
from lockstep.settings import check_choice

STRATEGIES = ("ddp", "fsdp2")


@dataclass(frozen=True)
class States:
    """Bytes that do not depend on the batch (Rajbhandari et al. 2020, section 3.1)."""

    weights: int
    gradients: int
    optimizer: int

    def shared(self, world_size: int) -> States:
        """Return the shard of one of `world_size` ranks."""
        sizes = (self.weights, self.gradients, self.optimizer)
        return States(*(math.ceil(size / world_size) for size in sizes))


@dataclass(frozen=True)
class Training:
    """What is trained, and how: any `nn.Module`, with content or without.

        >>> with torch.device("meta"):  # shapes are enough
        ...     model = nn.Linear(1000, 10)
        >>> example = torch.empty(1, 1000), torch.empty(1, dtype=torch.int64)
        >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
        >>> training = Training(model, example, lockstep.Batch(micro_size=8), loss)
        >>> training.states
        States(weights=40040, gradients=40040, optimizer=80080)
        >>> training.flops  # of a sample: 3 passes x 2 operations x 10,000 weights
        60000

    Args:
        model: on any device, also meta; it is copied without its content.
        example: a batch of one sample or more, of which only shapes and types count. Tensors have
            samples in their first dimension.
        batch: the samples of a step, before devices share it.
        loss: returns the loss of the model and a batch; by default, `model(*example)` is the loss.
        optimizer: returns an optimizer of named weights, such as `torch.optim.AdamW`; or the
            numbers that it keeps for each weight.
        precision: Lightning's: 32-true, bf16-mixed, 16-mixed, or 64-true.
        strategy: ddp or fsdp2.
        settings: arguments of `lockstep.DDP` or `lockstep.FSDP2`.
        blocks: the units that FSDP2 shards; None: `model.blocks`, if it has them, as for
            `lockstep.place`.
        clips: whether an update clips the norm of gradients.
        compiled: whether torch compiles the model.

    Raises:
        UserError: there is no such strategy, or a block isn't a part of the model.
    """

    model: nn.Module
    example: Any
    batch: Batch
    loss: Loss = loss_of
    optimizer: Callable[..., Optimizer] | float = AdamW
    precision: str = "32-true"
    strategy: str = "ddp"
    settings: Mapping[str, Any] = field(default_factory=dict)
    blocks: Sequence[nn.Module] | None = None
    clips: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        if not {*self.units} <= {*self.model.modules()}:
            raise UserError("blocks has a module that is no part of the model; pass its own parts")

    @property
    def units(self) -> list[nn.Module]:
        """The model's repeated parts."""
        blocks = getattr(self.model, "blocks", ()) if self.blocks is None else self.blocks
        return list(blocks)

    @property
    def tensor_parallel(self) -> int:
        """How many ranks split each matrix."""
        return int(self.settings.get("tensor_parallel", 1))

    @cached_property
    def shapes(self) -> nn.Module:
        """The model with weights of the type in which they are trained, on the meta device."""
        return copied(self.model, self.precision, "meta")[0]

    @property
    def parameters(self) -> int:
        """Numbers in the weights; what is tied counts once."""
        return sum(weight.numel() for weight in self.shapes.parameters())

    @property
    def gradients(self) -> list[int]:
        """Bytes of each gradient, in the model's order."""
        return [weight.nbytes for weight in self.shapes.parameters() if weight.requires_grad]

    @cached_property
    def states(self) -> States:
        """Bytes of weights, gradients, and moments, each in its own type."""
        weights = [*self.shapes.parameters(), *self.shapes.buffers()]
        gradients = sum(self.gradients)
        if callable(self.optimizer):
            moments = moment_bytes(self.optimizer, self.model, self.precision)
        else:
            moments = int(self.optimizer * gradients)
        return States(sum(weight.nbytes for weight in weights), gradients, moments)

    @cached_property
    def flops(self) -> int:
        """Operations of a sample in forward and backward."""
        return flops_per_sample(self.model, self.example, self.loss, self.precision)

    @cached_property
    def matrices(self) -> list[Tensor]:
        """The matrices that Muon orthogonalizes; none under another optimizer."""
        if not callable(self.optimizer):
            return []
        optimizer = self.optimizer(self.shapes.named_parameters())
        return optimizer.matrices if isinstance(optimizer, Muon) else []

    @property
    def sharing(self) -> Sharing | None:
        """How ranks share the states; None: each rank stores the whole model."""
        if self.strategy != "fsdp2":
            return None
        return Sharing.of(self.model, self.units, self.matrices, self.settings)

    @property
    def ownership(self) -> Ownership | None:
        """How ranks that store the whole model share Muon's matrices; None: they don't."""
        return None if self.strategy == "fsdp2" else Ownership.of(self.matrices)
