"""Time the three forms of the loss, and compare their gradients with exact ones.

The forms: whole logits, compiled or eager, and logits in chunks. `functional.most_whole_logits`
chooses by the memory and by whether the code is compiled; here we set its answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from clock import DEVICE, DRY, milliseconds, show
from torch import Tensor

from lockstep_gpt.model import functional

N, C, VOCABULARY, ROWS = (256, 32, 501, 512) if DRY else (32 * 1024, 768, 50257, 50304)
ALL = 1 << 60  # logits
NONE = 0
Loss = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def main() -> None:
    """Print a row for each form."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    features = torch.randn(1, N, C, device=DEVICE)
    head = torch.randn(ROWS, C, device=DEVICE) * 0.02
    targets = torch.randint(VOCABULARY, (1, N), device=DEVICE)
    reference = results(exact_loss, features, head, targets)
    torch.set_float32_matmul_precision("high")
    # Its own function, because torch compiles a function of another module by its file.
    compiled = torch.compile(lambda *given: functional.linear_cross_entropy(*given), dynamic=False)
    forms: dict[str, tuple[Loss, int]] = {
        "whole, compiled": (compiled, ALL),
        "whole, eager": (functional.linear_cross_entropy, ALL),
        "in chunks, compiled": (compiled, NONE),
        "in chunks, eager": (functional.linear_cross_entropy, NONE),
    }
    for name, (loss, most) in forms.items():
        torch.compiler.reset()
        functional.most_whole_logits = lambda _, most=most: most
        measure(name, loss, features, head, targets, reference)


def exact_loss(features: Tensor, head: Tensor, vocab_size: int, targets: Tensor) -> Tensor:
    """Return the loss in float32, without autocast."""
    with torch.autocast(DEVICE, enabled=False):
        return F.cross_entropy(features[0] @ head[:vocab_size].T, targets[0])


def results(loss: Loss, features: Tensor, head: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the loss, and the gradients of the features and of the head."""
    leaves = [features.clone().requires_grad_(), head.clone().requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        value = loss(*leaves, VOCABULARY, targets)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def measure(
    name: str,
    loss: Loss,
    features: Tensor,
    head: Tensor,
    targets: Tensor,
    reference: list[Tensor],
) -> None:
    """Print the time, the memory, and the errors of one form."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        took = milliseconds(lambda: results(loss, features, head, targets), 10)
        tensors = results(loss, features, head, targets)
    except Exception as error:
        show(name, f"does not run: {type(error).__name__} {str(error).splitlines()[0][:100]}")
        return
    errors = [
        float((ours - exact).norm() / exact.norm())
        for ours, exact in zip(tensors, reference, strict=True)
    ]
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    show(
        name,
        f"{took:.2f} ms, peak {peak:.1f} GB; relative errors: loss {errors[0]:.1e}, "
        f"features' gradient {errors[1]:.1e}, head's gradient {errors[2]:.1e}",
    )


if __name__ == "__main__":
    main()
