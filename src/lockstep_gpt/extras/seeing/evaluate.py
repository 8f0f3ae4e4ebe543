"""`lockstep-gpt evaluate RUN|CHECKPOINT`: the loss on all the text held out."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.data import shards
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.inference.source import load_model, parser_of
from lockstep_gpt.registry import asked
from lockstep_gpt.run.checkpoint import find_checkpoint

if TYPE_CHECKING:
    from lockstep_gpt.model.gpt import GPT


def main(arguments: list[str]) -> int:
    """Print loss, perplexity and, for text, bits per byte."""
    parser = parser_of("evaluate", "Measure loss and perplexity on all validation text.")
    batch = "samples at a time (default: 32)"
    parser.add_argument("--batch-size", type=int, default=32, help=batch)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        raise UserError(f"--batch-size={options.batch_size} must be at least 1")
    checkpoint = find_checkpoint(options.source)
    import torch  # only now: mistakes are answered at once

    model, config, _ = load_model(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        result = evaluate(model.to(device), config, options.batch_size)
    if options.json:
        print(json.dumps({"checkpoint": str(checkpoint), **result}))
        return 0
    print(f"{checkpoint} on {result['tokens']:,} tokens of validation")
    for name in ("loss", "perplexity", "bits_per_byte"):
        if name in result:
            print(f"  {name:<14}{result[name]:.4f}")
    return 0


def evaluate(model: GPT, config: Config, batch_size: int) -> dict[str, float]:
    """Return the means over all validation windows: loss in nats, perplexity, bits per byte."""
    import torch

    from lockstep_gpt.data.datamodule import TokenDataModule
    from lockstep_gpt.model.functional import perplexity
    from lockstep_gpt.training.token_loss import TokenLoss

    folder = prepare(config.data)
    index = shards.load_index(folder)
    block_size = config.model.block_size
    kind = next(filter(None, asked("DATA_MODULE", config.data)), TokenDataModule)
    sizes = {"block_size": block_size, "micro_size": batch_size, "accumulation": 1}
    data = kind(folder, **sizes, seed=config.seed)
    device = next(model.parameters()).device
    place = SimpleNamespace(root_device=device)  # all that batches need of a Trainer
    data.trainer = cast(Any, SimpleNamespace(strategy=place, global_rank=0, world_size=1))
    token_loss = TokenLoss().to(device)
    for stored in data.val_dataloader():
        moved = data.transfer_batch_to_device(stored, device)
        tokens, targets = data.on_after_batch_transfer(moved, 0)
        token_loss.update(model(tokens, targets), targets)
    data.teardown("validate")  # ends its processes, if it has some
    loss, split = float(token_loss.compute()), index.splits["val"]
    tokens_counted = int(torch.stack(token_loss.counts).sum())
    result = {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens_counted}
    parts = [each for name, each in index.splits.items() if name.rpartition("/")[2] == "val"]
    every = sum(each.tokens - 1 for each in parts if each.shards)  # the first is no target
    if split.text_bytes and tokens_counted in (data.val_windows * block_size, every):
        result["bits_per_byte"] = loss / math.log(2) * split.tokens / split.text_bytes
    return result
