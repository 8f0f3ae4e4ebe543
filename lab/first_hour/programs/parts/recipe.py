"""The model and the micro-batch of `gpt2_124m`; tiny ones in a dry run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from clock import DEVICE, DRY
from torch import Tensor
from zipf import zipf

from lockstep_gpt.gpt import GPT
from lockstep_gpt.language_model import VOCAB_MULTIPLE, LanguageModel

# Samples, tokens of a sample, width, layers, vocabulary.
B, T, C, L, V = (2, 16, 32, 2, 501) if DRY else (32, 1024, 768, 12, 50257)
HEADS = 2 if DRY else 12
PADDED_V = -(-V // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
ACCUMULATION = 8  # micro-batches of a step


def new_model(width: int = C, residual_dtype: str = "bfloat16") -> LanguageModel:
    """Return the model, with the same weights in each call."""
    torch.manual_seed(0)
    shape = {"block_size": T, "n_layer": L, "n_head": HEADS, "n_embd": width}
    with torch.device(DEVICE):
        return GPT(V, **shape, residual_dtype=residual_dtype)


def text_file(content: str, part: str) -> Path:
    """Return the path of a file beside the report, for what is too long for a row."""
    return Path(os.environ["FIRST_HOUR_OUT"]) / f"{content}-{part.replace(' ', '-')}.txt"


def micro_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets, the same in each call."""
    ids = torch.from_numpy(zipf((B, T + 1), V)).to(DEVICE)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
