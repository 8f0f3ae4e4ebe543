"""Muon for the matrices of the blocks, AdamW for the rest, as one optimizer.

Muon (Jordan et al. 2024) replaces a matrix's update with the nearest orthogonal one, so that all
directions move equally. Matrices of one shape are orthogonalized together: one by one, as torch
does it, costs twice as much.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lockstep_gpt.torch_patches import has_fast_bfloat16
from lockstep_gpt.training.optim_settings import OptimConfig

# a, b, c of x -> a x + b x^3 + c x^5, which brings singular values from 0..1 to about 1 in a
# few steps (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks").
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
MOMENTUM_WARMUP = 300  # steps from the lower momentum to the higher: gradients change fast at first
MOMENTA = (0.85, 0.95)


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, AdamW with `betas` and `eps` for the others."""

    # A tensor that is 1 if the gradients are not finite: then the weights stay.
    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        # With `fused`, torch restores the step count where AdamW's fused kernel reads it.
        groups = [{**group, "fused": not group["muon"]} for group in groups]
        super().__init__(groups, {"betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [weight for weight in group["params"] if weight.grad is not None]
            if not parameters:
                continue
            if not group["muon"]:
                self._update_by_adamw(parameters, group)
                continue
            for shape in dict.fromkeys(weight.shape for weight in parameters):
                same_shape = [weight for weight in parameters if weight.shape == shape]
                self._update_by_muon(same_shape, group)
        return loss

    def _update_by_muon(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape together, as a tensor of (N, rows, columns)."""
        states = [self._state(weight, ("momentum",)) for weight in parameters]
        gradients = torch.stack(_gradients(parameters))
        keep: Any = 1.0
        if self.found_inf is not None:
            # 0: this step changes nothing. Its type also rounds what it is multiplied with.
            keep = 1 - self.found_inf.to(torch.promote_types(gradients.dtype, torch.float32))
            gradients = gradients.where(keep > 0, 0.0)

        # The moving average of gradients, and the step count.
        warmed_up = min(1.0, int(states[0]["step"]) / MOMENTUM_WARMUP)
        momentum = MOMENTA[0] + warmed_up * (MOMENTA[1] - MOMENTA[0])
        averages = [state["momentum"] for state in states]
        average = torch.stack(averages).lerp_(gradients, (1 - momentum) * keep)
        torch._foreach_copy_(averages, average.unbind())
        torch._foreach_add_([state["step"] for state in states], 1)

        # The update: its size doesn't depend on the gradients'.
        updates = orthogonalized(gradients.lerp_(average, momentum))  # Nesterov momentum
        rows, columns = parameters[0].shape
        size = group["lr"] * max(1.0, rows / columns) ** 0.5
        decay = group["lr"] * group["weight_decay"]
        if decay != 0:
            torch._foreach_mul_(parameters, 1 - decay * keep)
        torch._foreach_add_(parameters, updates.mul_(-size * keep).unbind())

    def _update_by_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(weight, ("exp_avg", "exp_avg_sq")) for weight in parameters]
        adamw(
            parameters,
            _gradients(parameters),
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


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in parameters if weight.grad is not None]


def orthogonalized(matrices: Tensor) -> Tensor:
    """Return roughly the nearest orthogonal matrices of (N, rows, columns), by Newton-Schulz.

    Low precision is enough: singular values above 0.5 % of the matrix's norm end up between 0.6 and
    1.25 anyway. Smaller ones remain smaller.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(_product_type(matrices.device))
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    is_wide = x.shape[1] <= x.shape[2]
    for _ in range(ITERATIONS):
        if is_wide:  # x @ x.mT is the smaller of the two products
            gram = x @ x.mT
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, polynomial, x, beta=a)
        else:
            gram = x.mT @ x
            polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.baddbmm(x, x, polynomial, beta=a)
    return x.to(matrices.dtype)


def _product_type(device: torch.device) -> torch.dtype:
    """Return the narrowest dtype with fast products."""
    if device.type == "cpu" and not has_fast_bfloat16():
        return torch.float32
    return torch.bfloat16


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> Muon:
    """Give matrices in `model.blocks` to Muon; the head and the rest are AdamW's two groups."""
    matrices, head, rest = [], [], []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if name.startswith("blocks.") and weight.ndim == 2:
            matrices.append(weight)
        elif name == "output.weight":
            head.append(weight)
        else:
            rest.append(weight)
    # Always three, in this order, so a saved state fits any later run of the same model.
    groups = [
        {"params": matrices, "lr": lr, "muon": True, "weight_decay": config.weight_decay},
        {"params": head, "lr": config.head_lr_fraction * lr, "muon": False, "weight_decay": 0.0},
        {"params": rest, "lr": lr, "muon": False, "weight_decay": 0.0},
    ]
    return Muon(groups, betas=(config.beta1, config.beta2), eps=config.eps)
