"""`lockstep-gpt generate RUN|CHECKPOINT`: continue a prompt with a trained model."""

from __future__ import annotations

import sys

from lockstep.command_line import parser_of_run
from lockstep.errors import UserError
from lockstep.tokens import GrowingText, printable

from lockstep_gpt.trained_model import load_for_inference


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation as it grows."""
    parser = parser_of_run("generate", "Continue a prompt with a trained model.")
    add = parser.add_argument
    add("--prompt", default="\n", help="text to continue (default: a new line)")
    add("--length", type=int, default=300, help="tokens to add (default: 300)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    add("--top-k", type=int, help="draw from the K likeliest tokens (default: all)")
    add("--seed", type=int, default=1337, help="same seed, same text on the same device")
    options = parser.parse_args(arguments)
    if options.length < 1:
        raise UserError(f"--length={options.length} must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed={options.seed} must be from 0 to {2**63 - 1}")
    _, model, _, tokenizer = load_for_inference(options.source, options.trust)
    if not hasattr(model, "generate"):
        name = type(model).__name__
        raise UserError(f"{name} has no method generate, which continues tokens; give it one")
    import torch  # late, so that mistakes are reported at once

    device = next(model.parameters()).device
    prompt = torch.tensor(tokenizer.encode(options.prompt).astype("int64"), device=device)
    source = torch.Generator(device).manual_seed(options.seed)

    is_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(printable(text) if is_terminal else text, end="", flush=True)

    tokens = prompt[None]
    growing = GrowingText(tokenizer)
    for _ in range(options.length):
        tokens = model.generate(tokens, 1, options.temperature, options.top_k, source)
        show(growing.add(tokens[0, len(growing.ids) :].tolist()))
    show(growing.end())
    print()
    return 0
