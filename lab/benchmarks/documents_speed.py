#!/usr/bin/env python3
"""Measure what documents that don't see each other cost: attention, and a whole training step.

usage: python lab/benchmarks/documents_speed.py
           [--mean 300] [--threads 1] [--pairs 9] [--context 1024]

Each pair runs one with the mask and one without on the same tokens, one after the other; the
figures are medians of processor seconds (user and system), so other programs disturb them less.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lockstep.functional import causal_attention
from lockstep.mixtures.mask import attention_within, mask_documents
from lockstep.strategies.matrix_products import choose_matrix_products
from lockstep.tokens.tokenizer import ByteTokenizer
from torch import Tensor

from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT

HEADS, WIDTH, SAMPLES = 4, 128, 4
SHAPE = {"n_layer": 4, "n_head": HEADS, "n_embd": WIDTH}


def batch_of(context: int, mean: float) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (B, T); byte 0 ends a document, of exponential lengths."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(1, 256, SAMPLES * context)
    ends = np.cumsum(1 + draw.exponential(mean, 4 + 4 * int(tokens.size / mean)).astype(int))
    tokens[ends[ends < tokens.size]] = 0
    both = torch.tensor(tokens).view(SAMPLES, context)
    return both, both.roll(-1, 1)


def seconds(run: Callable[[], Any]) -> float:
    """Return the processor seconds of one run."""
    begun = time.process_time()
    run()
    return time.process_time() - begun


def compare(name: str, masked: Callable[[], Any], plain: Callable[[], Any], pairs: int) -> None:
    """Print the medians of both, and of their ratio."""
    masked()
    plain()
    times = [(seconds(masked), seconds(plain)) for _ in range(pairs)]
    ours, others = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(one / other for one, other in times)
    print(f"{name:<28} {ours:8.1f} ms  unmasked {others:8.1f} ms  ratio {ratio:.2f}", flush=True)


def step(model: Any, batch: tuple[Tensor, Tensor]) -> None:
    """Run forward and backward."""
    model.zero_grad()
    model(*batch).backward()


def attended(attend: Callable[..., Tensor], qkv: Tensor, scale: float) -> None:
    """Run the forward and backward of attention alone."""
    qkv.grad = None
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    attend(q, k, v, 0.0, scale).sum().backward()  # type: ignore[no-untyped-call]


def models(architecture: str, context: int) -> tuple[Any, Any]:
    """Return a masked model and one that is not."""
    shape: Any = {**SHAPE, "block_size": context}
    if architecture == "modern":
        kind: Any = ModernGPT
        shape |= {"ngram_rows": 4096, "longest_ngram": 4}
    else:
        kind = GPT
        shape |= {"bias": False}
    masked = kind(256, **shape)
    mask_documents(masked, ByteTokenizer())
    return masked, kind(256, **shape)


def main() -> int:
    """Compare attention and both models, on windows of several documents and of one."""
    parser = argparse.ArgumentParser(description="What the mask of documents costs.")
    parser.add_argument("--mean", type=float, default=300, help="mean tokens of a document")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--threads", type=int, default=1, help="threads of this process")
    parser.add_argument("--pairs", type=int, default=9, help="how often to measure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    choose_matrix_products("cpu")
    batch = batch_of(options.context, options.mean)
    qkv = torch.randn(SAMPLES, options.context, 3, HEADS, WIDTH // HEADS, requires_grad=True)
    for architecture in ("gpt", "modern"):
        masked, plain = models(architecture, options.context)
        if architecture == "gpt":
            masked.positions(batch[0])
            bounds = masked.positions.__self__.bounds
            within = partial(attention_within, bounds)
            ours = partial(attended, within, qkv, 0.2)
            compare("attention", ours, partial(attended, causal_attention, qkv, 0.2), options.pairs)
        several = partial(step, masked, batch), partial(step, plain, batch)
        compare(f"step of {architecture}", *several, options.pairs)
        one_document = batch[0].masked_fill(batch[0] == 0, 1), batch[1]
        one = partial(step, masked, one_document), partial(step, plain, one_document)
        compare(f"step of {architecture}, one document", *one, options.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
