"""Measures a trained module on held-out data, or a GPT on any text, on one or more ranks."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lockstep
import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from lockstep.checkpoints.content import refuse_broken_weights
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import UserError
from lockstep.functional import IGNORE, perplexity
from lockstep.metrics.mean import entries_of_ranks
from lockstep.ranks.cluster_environment import RanksEnvironment
from lockstep.ranks.ranks import Ranks, connect, from_each_rank, leave
from lockstep.run import rank_output
from lockstep.tokens import shards
from lockstep.tokens.sources.files import find_files
from lockstep.tokens.sources.source import Block, Position
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.windows import Batch as Pair
from omegaconf import DictConfig
from tqdm import tqdm

from lockstep_gpt.data import Tokens
from lockstep_gpt.language_model import LanguageModel
from lockstep_gpt.module import GPTModule, count_targets
from lockstep_gpt.trained_model import (
    OUR_MODULE,
    SAMPLES,
    mask_if_configured,
    tell_changes,
)

LONGEST_WAIT = 1800.0  # seconds for the other ranks
# Lightning also says that callbacks of training are absent.
NOISE = [*rank_output.NOISE, r".*callbacks used to create the checkpoint.*"]


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the other ranks in this context, if torchrun has started this one."""
    ranks = Ranks.from_environment()
    has_gpu = torch.cuda.is_available()
    if ranks.world_size > 1:
        connect(ranks, "nccl" if has_gpu else "gloo", has_gpu, LONGEST_WAIT)
    yield ranks
    leave()


def of_split(
    cfg: DictConfig,
    checkpoint: Path,
    content: dict[str, Any],
    split: str = "val",
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Measure a trained module on a split of its run's data, which is prepared if it is missing.

    Args:
        cfg: what `evaluate.configuration` returned.
        checkpoint: its path, for errors.
        content: of the checkpoint.
        split: `val` or `test`.
        batch_size: samples at a time, on each rank; None: `SAMPLES` of the GPT, and of another
            module as many as in training.

    Returns:
        what the module logs, over all samples. Of the GPT: `val/loss` in nats per token, and
        `val/perplexity`, or `test/...`; the number of targets, `tokens`; and, if the split is text
        whose tokens are all targets, `bits_per_byte`.

    Raises:
        UserError: the data can't be prepared, it has no such split, or the weights don't fit.
    """
    batch = _batch_of(cfg, batch_size)
    data = lockstep.build(cfg.data, batch=batch, seed=cfg.get("seed", 0))
    torch.manual_seed(cfg.get("seed", 0))
    vocab_size = getattr(data, "vocab_size", None)
    no_step = lockstep.Schedule(steps=1, peak=1.0)
    module = lockstep.build(cfg.module, schedule=no_step, vocab_size=vocab_size)
    if not isinstance(module, LightningModule):
        target = cfg.module["_target_"]
        raise UserError(f"module._target_={target} is no LightningModule; name a class that is one")
    if isinstance(module, GPTModule):
        mask_if_configured(cfg, module.model, getattr(data, "tokenizer", None))
        tell_changes(checkpoint, content, module.model)
    weights = content["state_dict"]
    names = [name for name, _ in module.named_parameters() if name in weights]
    refuse_broken_weights(((name, weights[name]) for name in names), f"checkpoint {checkpoint}")
    result = _measured(module, data, cfg, checkpoint, content, split)
    if isinstance(data, Tokens) and "tokens" in result:
        index = shards.load_index(data.prepared.folder)
        text_bytes = index.splits[split].text_bytes
        # The number of bytes is known only for all tokens together.
        if text_bytes and result["tokens"] in _counts_of_all_targets(data, index, split):
            tokens_per_byte = index.splits[split].tokens / text_bytes
            result["bits_per_byte"] = result[f"{split}/loss"] / math.log(2) * tokens_per_byte
    return result


def _batch_of(cfg: DictConfig, batch_size: int | None) -> lockstep.Batch:
    """Return how the ranks that are here share samples, without accumulation."""
    ranks = Ranks.from_environment()
    trained: Any = cfg.get("batch") or {}
    share = (trained.get("global_size") or 1) // ranks.world_size
    usual = trained.get("micro_size") or max(1, share)
    if cfg.module.get("_target_") == OUR_MODULE:
        usual = SAMPLES
    batch = lockstep.Batch(micro_size=batch_size or usual)
    return batch.spread_over(ranks.local_world_size, ranks.num_nodes)


def _measured(
    module: LightningModule,
    data: LightningDataModule,
    cfg: DictConfig,
    checkpoint: Path,
    content: dict[str, Any],
    split: str,
) -> dict[str, Any]:
    """Return what the validation or test steps log, the same on all ranks."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    is_double = cfg.get("precision") == "64-true"
    if is_double:
        module.double()  # the Trainer would only do so after loading the weights
    metrics = lockstep.Metrics()
    targets = CountedTargets() if isinstance(module, GPTModule) else None
    callbacks = [metrics] if targets is None else [targets, metrics]
    with warnings.catch_warnings():
        for pattern in NOISE:
            warnings.filterwarnings("ignore", pattern)
        trainer = _trainer(callbacks, content, is_double=is_double)
        run = trainer.validate if split == "val" else trainer.test
        try:
            # The path only says that there are weights: their content is already read.
            run(module, datamodule=data, ckpt_path=str(checkpoint), verbose=False)
        except MisconfigurationException as error:  # such as a split without a loader
            raise UserError(" ".join(str(error).split())) from None
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{checkpoint}: {reason}; use the code that wrote it") from None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    result: dict[str, Any] = {**logged, **metrics.row}  # the latter with all their digits
    return result if targets is None else {**result, "tokens": targets.of_all_ranks}


class ReadAlready(AtomicCheckpointIO):
    """Gives the Trainer a checkpoint whose file another process may have replaced by now.

    Args:
        content: of the checkpoint.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.content = content

    def load_checkpoint(self, *_arguments: Any, **_options: Any) -> dict[str, Any]:
        """Return the content."""
        return dict(self.content)


class CountedTargets(Callback):
    """Counts the targets of a GPT's micro-batches that aren't padding."""

    def __init__(self) -> None:
        self.of_all_ranks = 0
        self._counts: list[torch.Tensor] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count those of one micro-batch."""
        self._counts.append(count_targets(batch))

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add all; every rank must call this."""
        own = sum(int(count) for count in self._counts)
        self.of_all_ranks = sum(from_each_rank(own))

    on_test_epoch_end = on_validation_epoch_end


def _trainer(callbacks: list[Any], content: dict[str, Any], *, is_double: bool) -> Trainer:
    """Return a Trainer for this process, which is one rank; it writes nothing.

    Args:
        callbacks: of the Trainer.
        content: of the checkpoint that it loads.
        is_double: whether it computes in float64, as training did; else in float32, also if
            training had fewer bits.
    """
    ranks = Ranks.from_environment()
    is_alone = ranks.world_size == 1
    plugins: list[Any] = [ReadAlready(content), *([] if is_alone else [RanksEnvironment(ranks)])]
    return Trainer(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=ranks.local_world_size,
        num_nodes=ranks.num_nodes,
        strategy="auto" if is_alone else "ddp",
        precision="64-true" if is_double else "32-true",
        callbacks=callbacks,
        plugins=plugins,
        logger=DummyLogger(),  # without one, nothing is logged
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # as in training
    )


def _counts_of_all_targets(data: Tokens, index: shards.Index, split: str) -> tuple[int, int]:
    """Return how many targets a split has in all, in windows of a stream and in packed ones."""
    windows = sum(data.windows[split].counts.values())
    parts = [index.splits[name] for name in index.parts(split).values()]
    return windows * data.tokens_per_sample, sum(part.tokens - 1 for part in parts)


def of_text(
    model: LanguageModel, tokenizer: Tokenizer, path: str, batch_size: int
) -> dict[str, float]:
    """Measure a model on all tokens of text files but the first, which no token comes before.

    Args:
        model: on the device where it should run.
        tokenizer: of the model.
        path: a file, a folder, a glob, or a URL.
        batch_size: windows at a time; with several ranks, on each.

    Returns:
        means, as `of_split` returns them.

    Raises:
        UserError: there are no files, or they aren't text.
    """
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
    ranks = Ranks.from_environment()
    firsts = range(ranks.rank * batch_size, windows, ranks.world_size * batch_size)
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
    mean = lockstep.Mean("loss", also={"perplexity": perplexity})
    disable = None if Ranks.from_environment().rank == 0 else True
    for tokens, targets in tqdm(batches, "evaluating", count, leave=False, disable=disable):
        mean.update(model(tokens, targets), weight=(targets != IGNORE).sum())
    ranks = entries_of_ranks({"loss": mean})["loss"]
    counted = sum(weight for entries in ranks for _, weight in entries)
    return {**mean.columns(ranks), "tokens": int(counted)}
