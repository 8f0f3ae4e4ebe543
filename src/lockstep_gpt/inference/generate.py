"""`lockstep-gpt generate RUN|CHECKPOINT`: continue a prompt with a trained model."""

import sys

from lockstep_gpt.data.tokenizer import printable
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.trained_model import load_named_model, parser_of

# nanoGPT's options -> what to do here instead; docs/lightning.md shows them, too.
OTHER_NAMES = {
    "max_new_tokens": "write --length",
    "num_samples": "call it once for each text, with another --seed",
    "out_dir": "write the run directory without a name",
    "start": "write --prompt",
    "top_k": "write --top-k",
}


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation."""
    parser = parser_of("generate", "Continue a prompt with a trained model.")
    parser.other_names = {**parser.other_names, **OTHER_NAMES}
    add = parser.add_argument
    add("--prompt", default="\n", help="text to continue (default: a new line)")
    add("--length", type=int, default=300, help="tokens to add (default: 300)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)")
    add("--top-k", type=int, help="draw from the K likeliest tokens (default: all)")
    add("--seed", type=int, default=1337, help="same seed, same text")
    options = parser.parse_args(arguments)
    if options.length < 1:
        raise UserError(f"--length={options.length} must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed={options.seed} must be from 0 to {2**63 - 1}")
    _, model, _, tokenizer = load_named_model(options.source)
    import torch  # late, so that mistakes are reported at once

    prompt = torch.from_numpy(tokenizer.encode(options.prompt).astype("int64"))[None]
    source = torch.Generator().manual_seed(options.seed)
    tokens = model.generate(prompt, options.length, options.temperature, options.top_k, source)
    text = tokenizer.decode(tokens[0].tolist())
    if sys.stdout.isatty():
        text = printable(text)
    print(text)
    return 0
