"""Time the compiled forms of the loss, and compare their gradients with exact ones.

The forms: whole logits, and logits in chunks. `functional.most_whole_logits` chooses by the memory;
here we set its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from clock import DEVICE, milliseconds, show
from lockstep import functional
from torch import Tensor

from parts.gradients import WRONG, gradient_of, relative_error
from parts.recipe import PADDED_V, B, C, T, V, micro_batch

FORMS = {"whole logits": 1 << 60, "in chunks": 0}  # -> how many logits may exist at once
Loss = Callable[[Tensor, Tensor, int, Tensor], Tensor]


def main() -> None:
    """Print a row for each form."""
    torch.manual_seed(0)
    features = torch.randn(1, B * T, C, device=DEVICE)
    head = torch.randn(PADDED_V, C, device=DEVICE) * 0.02
    targets = micro_batch()[1].view(1, -1)
    torch.set_float32_matmul_precision("highest")
    reference = results(exact_loss, features, head, targets)
    torch.set_float32_matmul_precision("high")
    # Its own function, because torch compiles a function of another module by its file.
    compiled = torch.compile(lambda *given: functional.linear_cross_entropy(*given), dynamic=False)
    for name, most in FORMS.items():
        torch.compiler.reset()
        with most_whole_logits(most):
            measure(f"loss: {name}", compiled, features, head, targets, reference)


@contextmanager
def most_whole_logits(most: int) -> Iterator[None]:
    """Let the loss have this many logits at once, in the block."""
    usual = functional.most_whole_logits
    functional.most_whole_logits = lambda _: most
    try:
        yield
    finally:
        functional.most_whole_logits = usual


def exact_loss(features: Tensor, head: Tensor, vocab_size: int, targets: Tensor) -> Tensor:
    """Return the loss in float32, without autocast."""
    with torch.autocast(DEVICE, enabled=False):
        return F.cross_entropy(features[0] @ head[:vocab_size].T, targets[0])


def results(loss: Loss, features: Tensor, head: Tensor, targets: Tensor) -> list[Tensor]:
    """Return the loss, and the gradients of the features and of the head."""
    leaves = [features.clone().requires_grad_(), head.clone().requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        value = loss(*leaves, V, targets)
    value.backward()
    return [value.detach(), *map(gradient_of, leaves)]


def measure(
    name: str, loss: Loss, features: Tensor, head: Tensor, targets: Tensor, reference: list[Tensor]
) -> None:
    """Print the time, the memory, and the errors of one form; a wrong gradient is a failure."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = milliseconds(lambda: results(loss, features, head, targets), 10)
    tensors = results(loss, features, head, targets)
    errors = [relative_error(ours, exact) for ours, exact in zip(tensors, reference, strict=True)]
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE == "cuda" else 0.0
    show(
        name,
        f"{took:.2f} ms, peak {peak:.1f} GB; relative errors: loss {errors[0]:.1e}, "
        f"features' gradient {errors[1]:.1e}, head's gradient {errors[2]:.1e}",
        "" if max(errors) < WRONG else "FAILED",
    )
