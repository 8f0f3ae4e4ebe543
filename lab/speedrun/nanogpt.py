"""nanoGPT's documented recipe for a CPU, with the model of a checkout: the base of all ratios.

Its README's command: 4 layers, 4 heads, width 128, batches of 12 windows of 64 tokens, AdamW with a
learning rate of 1e-3, cosine decay to a tenth over 2,000 steps, in float32, not compiled.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS, WARMUP, RATE, LEAST = 2000, 100, 1e-3, 1e-4
SAMPLES, CONTEXT = 12, 64
STRETCH = 50  # steps between validations


def prepare(
    training: np.ndarray[Any, Any], seed: int, nanogpt: Path | None
) -> Iterator[tuple[int, Any]]:
    """Train on `training`, (N,) of uint8; yield the steps done and a function that predicts."""
    if nanogpt is None or not (nanogpt / "model.py").is_file():
        raise SystemExit(f"--nanogpt={nanogpt} has no model.py; give a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", nanogpt / "model.py")
    assert spec
    assert spec.loader
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    torch.manual_seed(seed)
    shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": CONTEXT, "vocab_size": 256}
    model = theirs.GPT(theirs.GPTConfig(**shape, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, RATE, (0.9, 0.99), "cpu")
    return _train(model, optimizer, torch.from_numpy(training.astype(np.int64)))


def _train(model: Any, optimizer: Any, tokens: torch.Tensor) -> Iterator[tuple[int, Any]]:
    windows = torch.arange(CONTEXT + 1)

    def predict(inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(inputs, inputs)[0]  # with targets, it returns all logits
        return logits

    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step)
        starts = torch.randint(len(tokens) - CONTEXT, (SAMPLES, 1))
        batch = tokens[starts + windows]
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % STRETCH == 0:
            yield step + 1, predict


def _rate(step: int) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    share = (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
    return LEAST + share * (RATE - LEAST)
