"""Time a step of AdamW and of Muon, whose update is compiled, at three sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from clock import DEVICE, DRY, free_memory, milliseconds, show
from lockstep.muon.optimizer import Muon
from lockstep.muon.placement import ReplicatedMatrices

from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.optim import adamw, muon

SMALL = {"124M": {"n_layer": 12, "n_head": 6, "n_embd": 768, "ngram_rows": 65536}}
LARGE = {
    "350M": {"n_layer": 24, "n_head": 8, "n_embd": 1024},
    "1.3B": {"n_layer": 24, "n_head": 16, "n_embd": 2048, "n_kv_head": 8},
}
TINY = {"tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64, "ngram_rows": 64}}
VOCABULARY = 257 if DRY else 50257


def main() -> None:
    """Print the rows of the recipe's size."""
    measure("optimizers: ", TINY if DRY else SMALL)


def large() -> None:
    """Print the rows of larger models, for a process that does nothing else."""
    measure("", TINY if DRY else LARGE)


def measure(prefix: str, shapes: dict[str, dict[str, int]]) -> None:
    """Print the rows of some sizes."""
    for size, shape in shapes.items():
        with torch.device(DEVICE):
            model = ModernGPT(VOCABULARY, block_size=1024, **shape)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        makers: list[Callable[..., Any]] = [adamw, muon]
        for make in makers:
            optimizer = make(model.named_parameters(), lr=1e-4, weight_decay=0.1)
            if isinstance(optimizer, Muon):
                optimizer.placement = ReplicatedMatrices(compiled=True)
            optimizer.found_inf = torch.zeros((), device=DEVICE)
            took = milliseconds(optimizer.step, 8, 3)
            show(f"{prefix}{size} {make.__name__}", f"{took:.2f} ms")
            del optimizer
        del model
        free_memory()
