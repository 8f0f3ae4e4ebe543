"""A mean whose bits don't depend on how samples are spread over ranks and micro-batches."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lockstep.ranks.ranks import from_each_rank

Entry = tuple[float, float]  # a value, and its weight


class Mean(Metric):
    """The weighted mean of values from all ranks; any module may have any number of them.

    `Metrics` logs each: one that a training step updates in each row, over the steps since the last
    one; one that a validation or a test updates after it. A checkpoint has what it has so far.

    The host adds without rounding in between (`math.fsum`): a mean of means would overweight a
    short batch, and a sum in any order would round by order.

        self.train_loss = Mean("train/loss")  # in a module's `__init__`
        self.train_loss.update(loss)  # in `training_step`

        >>> loss = lockstep.Mean("train/loss")
        >>> loss.update(torch.tensor(1.0), weight=3)
        >>> loss.update(torch.tensor(5.0))
        >>> loss.compute()
        tensor(2., dtype=torch.float64)

    Args:
        name: its column in the log.
        also: further columns -> functions of the mean.
    """

    full_state_update = False
    values: list[Tensor]
    weights: list[Tensor]

    def __init__(
        self, name: str, also: Mapping[str, Callable[[float], float]] | None = None
    ) -> None:
        super().__init__(sync_on_compute=False)  # `compute` gathers more exactly
        self.name = name
        self.also = dict(also or {})
        self._earlier: list[Entry] = []  # of the part of the run before a checkpoint
        self.add_state("values", [], dist_reduce_fx=None)
        self.add_state("weights", [], dist_reduce_fx=None)

    def update(self, value: Tensor, weight: Tensor | float = 1) -> None:
        """Add a scalar value.

        Args:
            value: a scalar; it stays on its device until the mean is computed.
            weight: how much it counts, such as the number of targets of which it is the mean.
        """
        self.values.append(value.detach())
        self.weights.append(torch.as_tensor(weight))

    @property
    def count(self) -> int:
        """How many values this rank has."""
        return len(self._earlier) + len(self.values)

    def compute(self) -> Tensor:
        """Return the mean over all ranks as a float64 scalar; every rank must call this."""
        ranks = from_each_rank(self.entries())
        return torch.tensor(self.columns(ranks)[self.name], dtype=torch.float64)

    def entries(self) -> list[Entry]:
        """Return what this rank has; it waits for the device."""
        pairs = zip(_numbers(self.values), _numbers(self.weights), strict=True)
        return [*self._earlier, *pairs]

    def columns(self, ranks: Sequence[list[Entry]]) -> dict[str, float]:
        """Return the columns of the log.

        Args:
            ranks: the entries of each.
        """
        mean = exact_mean([entry for entries in ranks for entry in entries])
        return {self.name: mean, **{name: derive(mean) for name, derive in self.also.items()}}

    def load_entries(self, entries: Sequence[Entry]) -> None:
        """Continue with what the ranks had; one rank must get all of it."""
        self.reset()
        self._earlier = [(float(value), float(weight)) for value, weight in entries]

    def reset(self) -> None:
        """Forget all values."""
        super().reset()
        self._earlier = []


def exact_mean(entries: Sequence[Entry]) -> float:
    """Return the weighted mean, rounded once; if nothing counts, all values count the same."""
    weight = math.fsum(weight for _, weight in entries)
    if not weight:
        entries = [(value, 1.0) for value, _ in entries]
        weight = float(len(entries))
    products = [value * weight for value, weight in entries]
    is_finite = all(map(math.isfinite, products))
    total = math.fsum(products) if is_finite else sum(products)  # fsum rejects inf - inf
    return total / weight


def means_of(module: nn.Module) -> dict[str, Mean]:
    """Return the means in a module, by their names."""
    return {part.name: part for part in module.modules() if isinstance(part, Mean)}


def replace_mean(module: nn.Module, mean: Mean) -> None:
    """Let `mean` take the place of the mean with its name."""
    for part in module.modules():
        for attribute, child in part.named_children():
            if isinstance(child, Mean) and child.name == mean.name:
                setattr(part, attribute, mean)


def entries_of_ranks(means: Mapping[str, Mean]) -> dict[str, list[list[Entry]]]:
    """Return the entries of each rank, of those means that have any; all ranks must call this."""
    own = {name: mean.entries() for name, mean in means.items()}
    ranks: list[dict[str, list[Entry]]] = from_each_rank(own)
    names = sorted({name for entries in ranks for name in entries})
    table = {name: [entries.get(name, []) for entries in ranks] for name in names}
    return {name: entries for name, entries in table.items() if any(entries)}


def _numbers(scalars: Sequence[Tensor]) -> Iterator[float]:
    """Return scalars as numbers of the host; those of one device in one copy."""
    if len({(scalar.device, scalar.dtype) for scalar in scalars}) == 1:
        numbers: list[Any] = torch.stack([scalar.reshape(()) for scalar in scalars]).tolist()
    else:
        numbers = [scalar.item() for scalar in scalars]
    return iter(map(float, numbers))
