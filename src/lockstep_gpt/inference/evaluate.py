"""`lockstep-gpt evaluate RUN`: metrics of held-out data, or the loss of a text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.run import trust
from lockstep_gpt.run.checkpoint import read_checkpoint
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.tokens import shards
from lockstep_gpt.tokens.data_settings import DataModuleConfig
from lockstep_gpt.tokens.prepare import prepare
from lockstep_gpt.tokens.sources.files import find_files
from lockstep_gpt.tokens.sources.source import Block, Position
from lockstep_gpt.tokens.sources.text import Text
from lockstep_gpt.tokens.tokenizer import Tokenizer
from lockstep_gpt.training.trained_model import (
    config_of,
    model_of,
    parser_of,
    with_newest,
)

if TYPE_CHECKING:
    import torch

    from lockstep_gpt.model.language_model import LanguageModel
    from lockstep_gpt.tokens.datamodule import TokenDataModule
    from lockstep_gpt.tokens.windows import Batch as Pair

LONGEST_WAIT = 1800.0  # seconds for the other ranks
SAMPLES = 32  # of the GPT at a time
SPLITS = {"val": "validation", "test": "the test split"}


def main(arguments: list[str]) -> int:
    """Print what validation or test steps log; of the GPT, also how well it compresses text.

    Started by torchrun, each rank evaluates its part, and rank 0 prints.
    """
    parser = parser_of("evaluate", "Measure a trained module on held-out data, or on any text.")
    add = parser.add_argument
    add("--split", choices=(*SPLITS,), default="val", help="of the run's data (default: val)")
    add("--data", help="text instead: a file, a folder, a glob, or a URL")
    size = f"samples at a time (default: {SAMPLES}; of a module of your own: as in training)"
    add("--batch-size", type=int, help=size)
    add("--trust", action="store_true", help="use classes that only the run's configuration names")
    add("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    batch_size = options.batch_size
    if batch_size is not None and batch_size < 1:
        raise UserError(f"--batch-size={batch_size} must be at least 1")
    checkpoint, content = with_newest(options.source, lambda path: (path, read_checkpoint(path)))
    config = config_of(checkpoint, content)
    _refuse_foreign(checkpoint, content, config, options.trust)
    import torch  # late, so that mistakes are reported at once

    if config.trains_gpt or options.data is not None:
        model, config, tokenizer = model_of(checkpoint, content, config)
        device = _join_ranks()
        if options.data is None:
            result = evaluate(model, config, batch_size or SAMPLES, options.split)
        else:
            model = model.to(device)
            with torch.inference_mode():
                result = evaluate_text(model, tokenizer, options.data, batch_size or SAMPLES)
    else:
        _join_ranks()
        result = evaluate_module(checkpoint, content, config, batch_size, options.split)
    if torch.distributed.is_initialized():
        is_first = torch.distributed.get_rank() == 0
        torch.distributed.destroy_process_group()
        if not is_first:
            return 0
    _print(checkpoint, result, options.data or SPLITS[options.split], as_json=options.json)
    return 0


def _print(checkpoint: Path, result: dict[str, Any], place: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"checkpoint": str(checkpoint), **result}))
        return
    tokens = f"{result['tokens']:,} tokens of " if "tokens" in result else ""
    print(f"{checkpoint} on {tokens}{place}")
    values = {name: value for name, value in result.items() if name != "tokens"}
    width = max([14, *(len(name) + 2 for name in values)])
    for name, value in values.items():
        print(f"  {name:<{width}}{value:.4f}")


def _refuse_foreign(
    checkpoint: Path, content: dict[str, Any], config: Config, trusted: bool
) -> None:
    """Raise a `UserError` for classes of someone else, which evaluating would run."""
    own_data = isinstance(config.data, DataModuleConfig)
    if own_data or not config.trains_gpt:
        file = f"{checkpoint}: its configuration"
        trust.permit_values(content["config"], trusted, file, "--trust")


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


def evaluate(
    model: LanguageModel, config: Config, batch_size: int, split: str = "val"
) -> dict[str, Any]:
    """Measure a GPT on a split of its run's data, which is prepared if it is missing.

    Args:
        model: of the run.
        config: of the run; it names the data and the length of a window.
        batch_size: windows at a time; with several ranks, on each.
        split: `val` or `test`.

    Returns:
        what the module logs, over all windows: `val/loss` in nats per token, and `val/perplexity`,
        or `test/...`; the number of targets, `tokens`; and, if the split is text whose tokens are
        all targets, `bits_per_byte`.

    Raises:
        UserError: the data can't be prepared, or it has no such split.
    """
    from lockstep_gpt.inference.held_out import measured
    from lockstep_gpt.module import GPTModule
    from lockstep_gpt.tokens.datamodule import TokenDataModule
    from lockstep_gpt.training.batches import build_data
    from lockstep_gpt.training.optim_settings import optimizer_of

    if not isinstance(config.data, DataModuleConfig):
        fingerprint = shards.load_index(prepare(config.data)).fingerprint
        whole = replace(config.data, val_tokens=None, fingerprint=fingerprint)
        config = replace(config, data=whole)
    data = build_data(config, _batch_of(config, batch_size))
    optimizer = partial(optimizer_of(config.optim), lr=config.optim.lr)
    module = GPTModule(model, optimizer, lambda _step: 1.0)
    result = measured(module, data, config, split)
    if not isinstance(data, TokenDataModule):
        return result
    index = shards.load_index(data.folder)
    text_bytes = index.splits[split].text_bytes
    # The number of bytes is known only for all tokens together.
    if text_bytes and result["tokens"] in _counts_of_all_targets(data, index, split):
        tokens_per_byte = index.splits[split].tokens / text_bytes
        result["bits_per_byte"] = result[f"{split}/loss"] / math.log(2) * tokens_per_byte
    return result


def evaluate_module(
    checkpoint: Path, content: dict[str, Any], config: Config, batch_size: int | None, split: str
) -> dict[str, Any]:
    """Measure a module of the user's on its run's data; return all metrics that it logs.

    Args:
        checkpoint: its path; a run's own configuration is next to its folder.
        content: of the checkpoint.
        config: of the run, as far as the checkpoint says.
        batch_size: samples at a time, on each rank; None: as in training.
        split: `val` or `test`.
    """
    from lockstep_gpt.inference.held_out import measured
    from lockstep_gpt.run.checkpoint_content import refuse_broken_weights
    from lockstep_gpt.training.batches import build_data
    from lockstep_gpt.training.building import build_own_module

    run = RunDirectory(checkpoint.parent.parent)
    if run.config.is_file():  # its references to the environment are resolved
        config = run.load()
    data = build_data(config, _batch_of(config, batch_size))
    module = build_own_module(config)
    weights = content["state_dict"]
    names = [name for name, _ in module.named_parameters() if name in weights]
    refuse_broken_weights(((name, weights[name]) for name in names), f"checkpoint {checkpoint}")
    return measured(module, data, config, split, content)


def _batch_of(config: Config, batch_size: int | None) -> Batch:
    """Return how the ranks that are here share samples, without accumulation."""
    from lockstep_gpt.distributed.ranks import Ranks

    ranks = Ranks.from_environment()
    share = (config.batch.global_size or 1) // ranks.world_size
    size = batch_size or config.batch.micro_size or max(1, share)
    return Batch(micro_size=size).spread_over(ranks.local_world_size, ranks.num_nodes)


def _counts_of_all_targets(
    data: TokenDataModule, index: shards.Index, split: str
) -> tuple[int, int]:
    """Return how many targets a split has in all, in windows of a stream and in packed ones."""
    windows = sum(data.windows[split].counts.values())
    parts = [index.splits[name] for name in index.parts(split).values()]
    return windows * data.block_size, sum(part.tokens - 1 for part in parts)


def evaluate_text(
    model: LanguageModel, tokenizer: Tokenizer, path: str, batch_size: int
) -> dict[str, float]:
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
    block_size = model.block_size
    windows = -(-(len(ids) - 1) // block_size)  # rounded up
    rank, world_size = rank_and_world_size()
    firsts = range(rank * batch_size, windows, world_size * batch_size)
    numbers = [range(first, min(first + batch_size, windows)) for first in firsts]
    result = _measure(model, _batches(ids, numbers, block_size, device), len(numbers))
    result["bits_per_byte"] = result["loss"] / math.log(2) * result["tokens"] / text_bytes
    return result


def _batches(
    ids: Any, numbers: list[range], block_size: int, device: torch.device
) -> Iterator[Pair]:
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


def _measure(model: LanguageModel, batches: Iterator[Pair], count: int) -> dict[str, float]:
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
