"""A fixture for all tests: how far each tensor's gradient in bfloat16 is from that in float32.

A loss may be right while a gradient is zero, as torch 2.11 compiled some (pytorch#180642).
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from torch import Tensor, nn

from lockstep import functional

LARGEST_ERROR = 3e-2  # of a right bfloat16 gradient, relative to its norm; here at most 2e-2
VOCAB, SAMPLES = 300, 4
SHAPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt": (GPT, {"residual_dtype": "bfloat16"}),
    "gpt, float32 residual": (GPT, {"residual_dtype": "float32"}),
    "modern": (ModernGPT, {"n_kv_head": 1, "ngram_rows": 64}),
}


@dataclass(frozen=True)
class Gradients:
    """Computes the gradients of a small model of some architecture on one device.

    Args:
        architecture: a key of `SHAPES`.
        device: cpu or cuda.
        tokens: of a sample.
        width: of the model, which has two heads.
    """

    architecture: str
    device: str = "cpu"
    tokens: int = 64
    width: int = 64

    def errors(
        self, is_compiled: bool = False, spoil: Callable[[nn.Module], object] | None = None
    ) -> dict[str, float]:
        """Return each tensor's relative error in bfloat16, compared with eager float32.

        Args:
            is_compiled: compile the model in bfloat16.
            spoil: is called with it before it computes.
        """
        shape = {"block_size": self.tokens, "n_layer": 2, "n_head": 2, "n_embd": self.width}
        kind, more = SHAPES[self.architecture]
        torch.manual_seed(0)
        reference = kind(VOCAB, **shape, **more)
        with torch.no_grad():
            for weight in reference.parameters():  # an initial zero would hide gradients
                weight.add_(0.02 * torch.randn_like(weight))
        reference.to(self.device)
        batch = [torch.randint(VOCAB, (SAMPLES, self.tokens), device=self.device) for _ in range(2)]
        model = copy.deepcopy(reference)
        reference(*batch).backward()
        if spoil is not None:
            spoil(model)
        if is_compiled:
            model.compile(dynamic=False)
        with torch.autocast(self.device, torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        return {
            name: relative_error(weight.grad, right.grad)
            for (name, right), weight in zip(
                reference.named_parameters(), model.parameters(), strict=True
            )
        }


def relative_error(found: Tensor | None, right: Tensor | None) -> float:
    """Return the norm of the difference by that of the right tensor, which must not be zero."""
    assert right is not None
    assert right.norm() > 0
    if found is None:
        return math.inf
    return float((found - right).norm() / right.norm())


def wrong_ones(errors: Mapping[str, float]) -> dict[str, float]:
    """Return the errors that rounding does not explain, also NaN."""
    return {name: error for name, error in errors.items() if not error < LARGEST_ERROR}


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gradients]:
    """Return what makes `Gradients`; with `in_chunks`, their loss takes 64 rows at a time."""

    def make(*arguments: str, in_chunks: bool = False, **settings: int) -> Gradients:
        if in_chunks:
            monkeypatch.setattr(functional, "MANY_LOGITS", 0)
            monkeypatch.setattr(functional, "WHOLE_SHARE", 0.0)
            for name in ("CHUNK_LOGITS", "GPU_CHUNK_LOGITS"):
                monkeypatch.setattr(functional, name, 64 * VOCAB)
        return Gradients(*arguments, **settings)

    return make


@pytest.fixture(scope="session")
def wrong_gradients() -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Return what selects the errors that rounding does not explain."""
    return wrong_ones
