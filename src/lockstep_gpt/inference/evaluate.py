"""`lockstep-gpt evaluate RUN|CHECKPOINT`: the loss on held-out text, or on any text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lockstep_gpt.config import Config
from lockstep_gpt.data import shards
from lockstep_gpt.data.packing import packing_of
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.sources.files import find_files
from lockstep_gpt.data.sources.source import Block, Position
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.training.trained_model import load_named_model, parser_of

if TYPE_CHECKING:
    import torch

    from lockstep_gpt.data.datamodule import TokenDataModule
    from lockstep_gpt.data.windows import Batch
    from lockstep_gpt.model.gpt import GPT

LONGEST_WAIT = 1800.0  # seconds for the other ranks


def main(arguments: list[str]) -> int:
    """Print loss, perplexity and, for text, bits per byte.

    Started by torchrun, each rank evaluates its part, and rank 0 prints.
    """
    parser = parser_of("evaluate", "Measure loss and perplexity on held-out text, or any text.")
    add = parser.add_argument
    add("--split", choices=("val", "test"), default="val", help="of the run's data (default: val)")
    add("--data", help="text instead: a file, a folder, a glob, or a URL")
    add("--batch-size", type=int, default=32, help="samples at a time (default: 32)")
    add("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    if options.batch_size < 1:
        raise UserError(f"--batch-size={options.batch_size} must be at least 1")
    checkpoint, model, config, tokenizer = load_named_model(options.source)
    import torch  # late, so that mistakes are reported at once

    device = _join_ranks()
    model = model.to(device)
    with torch.inference_mode():
        if options.data is None:
            result = evaluate(model, config, options.batch_size, options.split)
            text = {"val": "validation", "test": "the test split"}[options.split]
        else:
            result = evaluate_text(model, tokenizer, options.data, options.batch_size)
            text = options.data
    if torch.distributed.is_initialized():
        is_first = torch.distributed.get_rank() == 0
        torch.distributed.destroy_process_group()
        if not is_first:
            return 0
    if options.json:
        print(json.dumps({"checkpoint": str(checkpoint), **result}))
        return 0
    print(f"{checkpoint} on {result['tokens']:,} tokens of {text}")
    for name in ("loss", "perplexity", "bits_per_byte"):
        if name in result:
            print(f"  {name:<14}{result[name]:.4f}")
    return 0


def _join_ranks() -> torch.device:
    """Join the other ranks, if torchrun started this one; return this rank's device."""
    import torch

    from lockstep_gpt.distributed.ranks import Ranks, connect

    ranks = Ranks.from_environment()
    has_gpu = torch.cuda.is_available()
    if ranks.world_size > 1:
        connect(ranks, "nccl" if has_gpu else "gloo", has_gpu, LONGEST_WAIT)
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank, and how many there are."""
    import torch

    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def evaluate(model: GPT, config: Config, batch_size: int, split: str = "val") -> dict[str, float]:
    """Measure a model on a split of its run's data, which is prepared if it is missing.

    Args:
        model: on the device where it should run.
        config: of the run; it names the data and the length of a window.
        batch_size: windows at a time; with several ranks, on each.
        split: `val` or `test`.

    Returns:
        means over all windows: `loss` in nats per token, `perplexity`, and, if the split is text
        whose tokens are all targets, `bits_per_byte`; and the number of targets, `tokens`.

    Raises:
        UserError: the data can't be prepared, or it has no such split.
    """
    from lockstep_gpt.data.data_place import DataPlace
    from lockstep_gpt.data.datamodule import TokenDataModule
    from lockstep_gpt.data.loaders import eval_places
    from lockstep_gpt.data.reading import BatchReader
    from lockstep_gpt.data.windows import move_to_device

    folder = prepare(config.data)
    index = shards.load_index(folder)
    data = TokenDataModule(
        folder,
        block_size=config.model.block_size,
        micro_size=batch_size,
        seed=config.seed,
        packing=packing_of(config.packing._target_),
    )
    device = next(model.parameters()).device
    windows = data.windows_of(split)
    place = DataPlace(*rank_and_world_size())
    places = eval_places(len(windows), batch_size, place, is_padded=True, is_exact=False)
    reader = BatchReader(windows, 0, windows.collate, windows.pad)
    batches = (windows.widen(move_to_device(reader.__getitems__(at), device)) for at in places)
    result = _measure(model, batches, len(places))
    text_bytes = index.splits[split].text_bytes
    # The number of bytes is known only for all tokens together.
    if text_bytes and result["tokens"] in _counts_of_all_targets(data, index, split):
        tokens_per_byte = index.splits[split].tokens / text_bytes
        result["bits_per_byte"] = result["loss"] / math.log(2) * tokens_per_byte
    return result


def _counts_of_all_targets(
    data: TokenDataModule, index: shards.Index, split: str
) -> tuple[int, int]:
    """Return how many targets a split has in all, in windows of a stream and in packed ones."""
    windows = sum(data.windows[split].counts.values())
    parts = [index.splits[name] for name in index.parts(split).values()]
    return windows * data.block_size, sum(part.tokens - 1 for part in parts)


def evaluate_text(model: GPT, tokenizer: Tokenizer, path: str, batch_size: int) -> dict[str, float]:
    """Measure a model on all tokens of text files but the first, which no token comes before.

    Args:
        model: on the device where it should run.
        tokenizer: of the model.
        path: a file, a folder, a glob, or a URL.
        batch_size: windows at a time; with several ranks, on each.

    Returns:
        means, as `evaluate` returns them.

    Raises:
        UserError: there are no files, or they aren't text.
    """
    import numpy as np

    source = Text(path=path)
    source.file_groups = [find_files(path, setting="--data", split="test")]  # whole, not divided
    pieces = []
    text_bytes = 0
    for block in source.blocks(Position()):
        assert isinstance(block, Block)
        pieces.append(tokenizer.encode_documents(block.texts))
        text_bytes += sum(map(len, block.texts))
    ids = np.concatenate(pieces)
    if len(ids) < 2:
        raise UserError(f"--data={path} has no text; give a file or a folder with some")
    device = next(model.parameters()).device
    block_size = model.config.block_size
    windows = -(-(len(ids) - 1) // block_size)  # rounded up
    rank, world_size = rank_and_world_size()
    firsts = range(rank * batch_size, windows, world_size * batch_size)
    numbers = [range(first, min(first + batch_size, windows)) for first in firsts]
    result = _measure(model, _batches(ids, numbers, block_size, device), len(numbers))
    result["bits_per_byte"] = result["loss"] / math.log(2) * result["tokens"] / text_bytes
    return result


def _batches(
    ids: Any, numbers: list[range], block_size: int, device: torch.device
) -> Iterator[Batch]:
    """Yield batches of windows, each two tensors of shape (B, T): inputs and targets.

    Args:
        ids: all tokens, of shape (N,). The last window is padded, with targets that don't count.
        numbers: of the windows of each batch.
        block_size: T, the length of a window.
        device: of the tensors.
    """
    import numpy as np
    import torch

    from lockstep_gpt.model.functional import IGNORE

    for of_batch in numbers:
        tokens = np.zeros((len(of_batch), block_size), np.int64)
        targets = np.full((len(of_batch), block_size), IGNORE, np.int64)
        for row, number in enumerate(of_batch):
            start = number * block_size
            window = ids[start : start + block_size + 1]
            tokens[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        yield torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device)


def _measure(model: GPT, batches: Iterator[Batch], count: int) -> dict[str, float]:
    """Return loss, perplexity, and the number of targets, over the batches of all ranks.

    Args:
        model: on the device of the batches.
        batches: of this rank.
        count: how many there are, for the progress bar of rank 0, which only a terminal shows.
    """
    from tqdm import tqdm

    from lockstep_gpt.model.functional import IGNORE, perplexity
    from lockstep_gpt.run.means import Mean, entries_of_ranks

    mean = Mean("loss", also={"perplexity": perplexity})
    rank, _ = rank_and_world_size()
    disable = None if rank == 0 else True
    for tokens, targets in tqdm(batches, "evaluating", count, leave=False, disable=disable):
        mean.update(model(tokens, targets), weight=(targets != IGNORE).sum())
    ranks = entries_of_ranks({"loss": mean})["loss"]
    counted = sum(weight for entries in ranks for _, weight in entries)
    return {**mean.columns(ranks), "tokens": int(counted)}
