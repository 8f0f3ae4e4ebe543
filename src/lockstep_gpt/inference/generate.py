"""`lockstep-gpt generate RUN|CHECKPOINT`: continue a prompt with a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lockstep_gpt.data.tokenizer import INCOMPLETE, Tokenizer, printable
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.trained_model import load_for_inference, parser_of

if TYPE_CHECKING:
    from torch import Tensor

# nanoGPT's options -> what to do here instead; docs/lightning.md shows them, too.
OTHER_NAMES = {
    "max_new_tokens": "write --length",
    "num_samples": "call it once for each text, with another --seed",
    "out_dir": "write the run directory without a name",
    "start": "write --prompt",
    "top_k": "write --top-k",
}


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation as it grows."""
    parser = parser_of("generate", "Continue a prompt with a trained model.")
    parser.other_names = {**parser.other_names, **OTHER_NAMES}
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
    _, model, _, tokenizer = load_for_inference(options.source)
    import torch  # late, so that mistakes are reported at once

    device = next(model.parameters()).device
    prompt = torch.tensor(tokenizer.encode(options.prompt).astype("int64"), device=device)
    source = torch.Generator(device).manual_seed(options.seed)

    def growing() -> Iterator[Tensor]:
        tokens = prompt[None]
        for _ in range(options.length):
            tokens = model.generate(tokens, 1, options.temperature, options.top_k, source)
            yield tokens[0]

    is_terminal = sys.stdout.isatty()
    for text in new_texts(growing(), tokenizer):
        print(printable(text) if is_terminal else text, end="", flush=True)
    print()
    return 0


def new_texts(growing: Iterator[Tensor], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield what each of the `growing` token sequences, (T,), adds to the text of the one before.

    The last characters are held back until their bytes are complete, or until the end.
    """
    shown = text = ""
    for tokens in growing:
        text = tokenizer.decode(tokens.tolist())
        complete = text.rstrip(INCOMPLETE)
        yield complete[len(shown) :]
        shown = complete
    yield text[len(shown) :]
