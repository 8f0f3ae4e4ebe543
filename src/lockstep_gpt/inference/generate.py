"""`lockstep-gpt generate RUN|CHECKPOINT`: continue a prompt with a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep_gpt.config import PROGRAM, UserError
from lockstep_gpt.run_directory import refuse_missing


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation."""
    options = _parser().parse_args(arguments)
    if options.length < 0:
        raise UserError(f"--length={options.length} must be at least 0")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed={options.seed} must be from 0 to {2**63 - 1}")
    refuse_missing(options.source)
    import torch  # only now: mistakes are answered at once

    from lockstep_gpt.training.checkpoint import find_checkpoint, load_model

    model, _, tokenizer = load_model(find_checkpoint(options.source))
    prompt = tokenizer.encode(options.prompt).astype("int64")
    tokens = model.generate(
        torch.from_numpy(prompt)[None],
        options.length,
        options.temperature,
        options.top_k,
        torch.Generator().manual_seed(options.seed),
    )
    print(tokenizer.decode(tokens[0].tolist()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} generate", description="Continue a prompt with a trained model."
    )
    parser.add_argument(
        "source",
        type=Path,
        help="a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS",
    )
    parser.add_argument("--prompt", default="\n", help="what to continue (default: a new line)")
    parser.add_argument("--length", type=int, default=300, help="tokens to add (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, help="draw from the K likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=1337, help="same seed, same text")
    return parser
