"""Which rank keeps the momentum of which of Muon's matrices, and which orthogonalizes it.

Muon asks a `MatrixPlacement`. Each one consists of the same three functions on matrices of one
shape, `nesterov_gradients`, `orthogonalized`, and `add_updates`, with an exchange between them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.muon import orthogonalization
from lockstep.muon.orthogonalization import orthogonalized
from lockstep.patches.torch import compiled_for_each_shape


class Rates(NamedTuple):
    """The factors of one update, as scalars on the device: new values need no new compilation."""

    momentum: Tensor  # the average's share in the direction of the update
    inflow: Tensor  # the gradient's share in the average: 1 - momentum
    size: Tensor  # of the update, for matrices of one shape
    decay: Tensor | None  # share of the weights that is subtracted from them
    keep: Tensor  # 1; 0: the gradients are not finite, and the update changes nothing


class MatrixPlacement(Protocol):
    """What `Muon` asks about its matrices, in every rank, in the same order on all ranks."""

    def keeps(self, matrix: Tensor) -> bool:
        """Return whether this rank keeps the momentum of `matrix`."""

    def update(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
        rates_of: Callable[[torch.Size], Rates],
    ) -> None:
        """Update this rank's weights and momentum once.

        Args:
            matrices: all that have a gradient.
            momenta: the moving averages of gradients of those that this rank keeps.
            rates_of: returns the factors for matrices of a shape.
        """

    def whole_momenta(
        self, matrices: Sequence[Tensor], momenta: Mapping[Tensor, Tensor]
    ) -> Mapping[Tensor, Tensor]:
        """Return the momentum of all `matrices`, on the first rank of each machine.

        Every rank must call this.

        Args:
            matrices: all that have been updated.
            momenta: of those that this rank keeps.
        """


class ReplicatedMatrices:
    """Each rank keeps and orthogonalizes all matrices; the choice for a single device.

    Args:
        compiled: compute the whole update of the matrices of one shape in one compiled function.
        one_by_one: orthogonalize each matrix by itself, not in a stack.
    """

    def __init__(self, compiled: bool = False, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self._update_together = update_together
        if compiled:
            self._update_together = compiled_for_each_shape(update_together)

    def keeps(self, matrix: Tensor) -> bool:
        """Return True."""
        return True

    def update(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
        rates_of: Callable[[torch.Size], Rates],
    ) -> None:
        """Update the matrices of each shape together."""
        for shape, weights in by_shape(matrices):
            averages = [momenta[weight] for weight in weights]
            dtype = orthogonalization.product_type(weights[0].device)
            self._update_together(
                weights,
                gradients_of(weights),
                averages,
                rates_of(shape),
                dtype,
                self._one_by_one,
            )

    def whole_momenta(
        self,
        matrices: Sequence[Tensor],
        momenta: Mapping[Tensor, Tensor],
    ) -> Mapping[Tensor, Tensor]:
        """Return `momenta`."""
        return momenta


def by_shape(matrices: Sequence[Tensor]) -> Iterator[tuple[torch.Size, list[Tensor]]]:
    """Yield each shape, in the order of its first matrix, and all matrices of this shape."""
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        yield shape, [matrix for matrix in matrices if matrix.shape == shape]


def gradients_of(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients, of matrices that have one."""
    return [matrix.grad for matrix in matrices if matrix.grad is not None]


def update_together(
    weights: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    rates: Rates,
    dtype: torch.dtype,
    one_by_one: bool,
) -> None:
    """Update N matrices of one shape, and their momentum; `updates_of` explains the arguments."""
    add_updates(weights, updates_of(gradients, averages, rates, dtype, one_by_one), rates)


def updates_of(
    gradients: list[Tensor],
    averages: list[Tensor],
    rates: Rates,
    dtype: torch.dtype,
    one_by_one: bool,
) -> Tensor:
    """Return orthogonal updates of N matrices of one shape, (N, rows, columns).

    Args:
        gradients: of (rows, columns) each.
        averages: the momentum of each matrix; changed in place.
        rates: the factors.
        dtype: of the products and of the result.
        one_by_one: don't stack the matrices for the products: on a GPU, a product's bits may depend
            on how many are computed together.
    """
    directions = nesterov_gradients(gradients, averages, rates)
    if one_by_one:
        return torch.cat(
            [orthogonalized(direction, dtype) for direction in torch.split(directions, 1)]
        )
    return orthogonalized(directions, dtype)


def nesterov_gradients(gradients: list[Tensor], averages: list[Tensor], rates: Rates) -> Tensor:
    """Add N gradients to their moving averages, and return Nesterov's mean of both.

    The result, (N, rows, columns), is what must be orthogonalized.
    """
    stacked = torch.stack(gradients).where(rates.keep > 0, 0.0)
    average = torch.stack(averages).lerp_(stacked, rates.inflow * rates.keep)
    torch._foreach_copy_(averages, average.unbind())
    return stacked.lerp_(average, rates.momentum)


def add_updates(weights: list[Tensor], updates: Tensor, rates: Rates) -> None:
    """Decay N weights, and subtract the orthogonal `updates`, (N, rows, columns), of any dtype."""
    if rates.decay is not None:
        torch._foreach_mul_(weights, 1 - rates.decay * rates.keep)
    steps = updates.to(weights[0].dtype) * (-rates.size * rates.keep)
    torch._foreach_add_(weights, steps.unbind())
