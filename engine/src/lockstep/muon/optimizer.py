"""Muon for the matrices of the blocks, AdamW for the rest, as one optimizer.

Muon (Jordan et al. 2024) replaces a matrix's update with the nearest orthogonal one, so that all
directions move equally. Matrices of one shape are orthogonalized together: one by one, as torch
does it, costs twice as much.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from lockstep.muon.owned import OwnedMatrices
from lockstep.muon.placement import (
    MatrixPlacement,
    Rates,
    ReplicatedMatrices,
    by_shape,
    gradients_of,
)
from lockstep.muon.sharded import ShardedMatrices

if TYPE_CHECKING:  # it imports Lightning, which takes seconds, and plans need none
    from lightning.pytorch.strategies import Strategy

MOMENTUM_WARMUP = 300  # steps from the lower momentum to the higher: gradients change fast at first
MOMENTA = (0.85, 0.95)


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, AdamW with `betas` and `eps` for the others.

    >>> matrix = torch.nn.Parameter(torch.zeros(4, 4))
    >>> group = {"params": [matrix], "lr": 0.02, "weight_decay": 0.0, "muon": True}
    >>> optimizer = lockstep.Muon([group], betas=(0.9, 0.95), eps=1e-8)

    Args:
        groups: of weights, each with `lr`, `weight_decay`, and `muon`; those with it have matrices.
        betas: AdamW's decays of the means of gradients and of their squares.
        eps: added to AdamW's denominator.
    """

    placement: MatrixPlacement = ReplicatedMatrices()  # until `share_work` chooses another
    # A tensor that is 1 if the gradients are not finite: then the weights stay.
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        # With `fused`, torch restores the step count where AdamW's fused kernel reads it.
        groups = [{**group, "fused": not group["muon"]} for group in groups]
        super().__init__(groups, {"betas": betas, "eps": eps})

    @property
    def matrices(self) -> list[Tensor]:
        """All matrices that are updated by Muon."""
        return [
            weight for group in self.param_groups if group["muon"] for weight in group["params"]
        ]

    def share_work(self, strategy: "Strategy", compiled: bool) -> None:
        """Let the ranks of a strategy share the work, on replicas or shards; ours call this.

        With exact sums, the matrices that a rank works on may not change their bits. Compiled code
        may add the numbers of one matrix in another order than those of a stack, and so may a GPU.
        """
        from lockstep.strategies.exact_sums import AddsGradients
        from lockstep.strategies.placing import layout_of

        layout = layout_of(strategy)
        is_exact = isinstance(strategy, AddsGradients) and strategy.exact_threads is not None
        compiled = compiled and not is_exact
        one_by_one = is_exact and strategy.root_device.type == "cuda"
        self.placement = ReplicatedMatrices(compiled, one_by_one)
        if not layout.has_replicas:
            self.placement = ShardedMatrices(compiled)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            self.placement = OwnedMatrices(self.matrices, compiled, one_by_one)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights once; every rank must call this."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [weight for weight in group["params"] if weight.grad is not None]
            if not parameters:
                continue
            if group["muon"]:
                self._update_by_muon(parameters, group)
            else:
                self._update_by_adamw(parameters, group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state, the same as a single device's; every rank must call this.

        It is whole on the first rank of each machine.
        """
        states: dict[str, Any] = super().state_dict()
        updated = [matrix for matrix in self.matrices if self.state.get(matrix)]
        momenta = self.placement.whole_momenta(updated, self._momenta(updated))
        for number, weight in self._numbered(states):
            if weight in momenta:
                states["state"][number] = {**self.state[weight], "momentum": momenta[weight]}
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank keeps of a whole state."""
        states = dict(state_dict["state"])
        matrices = set(self.matrices)
        for number, weight in self._numbered(state_dict):
            if number in states and weight in matrices and not self.placement.keeps(weight):
                states[number] = {"step": states[number]["step"]}
        super().load_state_dict({**state_dict, "state": states})

    def _numbered(self, states: dict[str, Any]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number that each weight has in `states`."""
        for saved, group in zip(states["param_groups"], self.param_groups, strict=False):
            yield from zip(saved["params"], group["params"], strict=False)

    def _momenta(self, matrices: list[Tensor]) -> dict[Tensor, Tensor]:
        return {
            matrix: self.state[matrix]["momentum"]
            for matrix in matrices
            if self.placement.keeps(matrix)
        }

    def _update_by_muon(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        for _, same_shape in by_shape(matrices):  # the order of states in a checkpoint
            for matrix in same_shape:
                names = ("momentum",) if self.placement.keeps(matrix) else ()
                self._state(matrix, names)
        steps = [self.state[matrix]["step"] for matrix in matrices]
        warmed_up = min(1.0, int(steps[0]) / MOMENTUM_WARMUP)
        momentum = MOMENTA[0] + warmed_up * (MOMENTA[1] - MOMENTA[0])
        torch._foreach_add_(steps, 1)

        self.placement.update(matrices, self._momenta(matrices), self._rates(group, momentum))

    def _rates(self, group: dict[str, Any], momentum: float) -> Callable[[torch.Size], Rates]:
        """Return the function that gives the factors of this update for a shape."""
        weight = group["params"][0]
        # Also rounds what it is multiplied with.
        dtype = torch.promote_types(weight.dtype, torch.float32)

        def scalar(value: float) -> Tensor:
            return torch.full((), value, dtype=dtype, device=weight.device)

        share = scalar(momentum)
        inflow = scalar(1 - momentum)
        keep = scalar(1.0)
        if self.found_inf is not None:
            keep = 1 - self.found_inf.to(dtype)
        decay = None
        if group["weight_decay"]:
            decay = scalar(group["lr"] * group["weight_decay"])

        def rates_of(shape: torch.Size) -> Rates:
            rows, columns = shape
            size = scalar(group["lr"] * max(1.0, rows / columns) ** 0.5)
            return Rates(share, inflow, size, decay, keep)

        return rates_of

    def _update_by_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(weight, ("exp_avg", "exp_avg_sq")) for weight in parameters]
        adamw(
            parameters,
            gradients_of(parameters),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _state(self, parameter: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            # AdamW's fused kernel needs its count on the weights' device.
            device = parameter.device if "exp_avg" in names else torch.device("cpu")
            state["step"] = torch.zeros((), device=device)
            state.update({name: torch.zeros_like(parameter) for name in names})
        return state
