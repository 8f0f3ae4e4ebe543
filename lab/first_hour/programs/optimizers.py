"""Time a step of AdamW and of Muon, with its update eager and compiled, at three sizes."""

from __future__ import annotations

import gc

import torch
from clock import DEVICE, DRY, milliseconds, show
from torch import nn

from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training.matrix_placement import ReplicatedMatrices
from lockstep_gpt.training.muon import Muon
from lockstep_gpt.training.optim import build_optimizer
from lockstep_gpt.training.optim_settings import OptimConfig

SHAPES = {
    "124M": {"n_layer": 12, "n_head": 6, "n_embd": 768, "ngram_rows": 65536},
    "350M": {"n_layer": 24, "n_head": 8, "n_embd": 1024},
    "1.3B": {"n_layer": 24, "n_head": 16, "n_embd": 2048, "n_kv_head": 8},
}
TINY = {"tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64, "ngram_rows": 64}}
VOCABULARY = 257 if DRY else 50257


def main() -> None:
    """Print the rows of each size."""
    for size, shape in (TINY if DRY else SHAPES).items():
        config = ModelConfig(block_size=1024, bias=False, architecture="modern", **shape)
        with torch.device(DEVICE):
            model = build_gpt(config, VOCABULARY)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        time_step(f"{size} adamw", model, "adamw")
        time_step(f"{size} muon", model, "muon")
        time_step(f"{size} muon, compiled", model, "muon", compiled=True)
        del model
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


def time_step(name: str, model: nn.Module, algorithm: str, compiled: bool = False) -> None:
    """Print a row: the time of an optimizer's step."""
    optimizer = build_optimizer(model, OptimConfig(algorithm=algorithm), 1e-4)
    if isinstance(optimizer, Muon):
        optimizer.placement = ReplicatedMatrices(compiled)
    optimizer.found_inf = torch.zeros((), device=DEVICE)
    show(name, f"{milliseconds(optimizer.step, 8, 3):.2f} ms")


if __name__ == "__main__":
    main()
