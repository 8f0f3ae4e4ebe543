"""Measures a trained module on held-out data, or a language model on any text, on all ranks."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import DictConfig
from torch import Tensor, nn
from tqdm import tqdm

from lockstep.batch import Batch
from lockstep.building import build
from lockstep.checkpoints.content import refuse_broken_weights
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.errors import UserError
from lockstep.functional import IGNORE, perplexity
from lockstep.metrics.callback import Metrics
from lockstep.metrics.mean import Mean, entries_of_ranks
from lockstep.ranks.cluster_environment import RanksEnvironment
from lockstep.ranks.ranks import Ranks, connect, from_each_rank, leave
from lockstep.run import rank_output
from lockstep.run.source_code import tell_changes
from lockstep.schedule import Schedule
from lockstep.tokens.sources.files import find_files
from lockstep.tokens.sources.source import Block, Position
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.windows import Batch as Pair

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
    """Return what a trained module logs, over all samples of a split of its run's data.

    See `Trained` for the arguments.
    """
    return Trained(cfg, checkpoint, content, batch_size).measured(split)


class Trained:
    """A trained module and its run's data, which are prepared if they are missing.

    Args:
        cfg: what `command.configuration` returned.
        checkpoint: its path, for errors.
        content: of the checkpoint.
        batch_size: samples at a time, on each rank; None: as many as in training.

    Raises:
        UserError: the data can't be prepared, or the configuration has no LightningModule.
    """

    def __init__(
        self,
        cfg: DictConfig,
        checkpoint: Path,
        content: dict[str, Any],
        batch_size: int | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.content = content
        self.is_double = cfg.get("precision") == "64-true"
        seed = cfg.get("seed", 0)
        self.data: LightningDataModule = build(
            cfg.data, batch=_batch_of(cfg, batch_size), seed=seed
        )
        torch.manual_seed(seed)
        vocab_size = getattr(self.data, "vocab_size", None)
        no_step = Schedule(steps=1, peak=1.0)
        module = build(cfg.module, schedule=no_step, vocab_size=vocab_size)
        if not isinstance(module, LightningModule):
            target = cfg.module["_target_"]
            raise UserError(
                f"module._target_={target} is no LightningModule; name a class that is one"
            )
        self.module = module

    def measured(
        self, split: str, count: Callable[[Any], Tensor] | None = None, counted: str = "tokens"
    ) -> dict[str, Any]:
        """Return what the validation or test steps log, the same on all ranks.

        Args:
            split: `val` or `test`.
            count: of a micro-batch, what the result should also have the sum of; None: nothing.
            counted: the name of this sum.

        Raises:
            UserError: the data have no such split, or the weights don't fit.
        """
        tell_changes(self.checkpoint, self.content, self.module)
        weights = self.content["state_dict"]
        names = [name for name, _ in self.module.named_parameters() if name in weights]
        of_file = f"checkpoint {self.checkpoint}"
        refuse_broken_weights(((name, weights[name]) for name in names), of_file)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        if self.is_double:
            self.module.double()  # the Trainer would only do so after loading the weights
        metrics = Metrics()
        counter = Counter(count) if count else None
        callbacks = [counter, metrics] if counter else [metrics]
        with warnings.catch_warnings():
            for pattern in NOISE:
                warnings.filterwarnings("ignore", pattern)
            trainer = _trainer(callbacks, self.content, is_double=self.is_double)
            self._run(trainer, split)
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        result: dict[str, Any] = {**logged, **metrics.row}  # the latter with all their digits
        return {**result, counted: counter.of_all_ranks} if counter else result

    def _run(self, trainer: Trainer, split: str) -> None:
        run = trainer.validate if split == "val" else trainer.test
        try:
            # The path only says that there are weights: their content is already read.
            run(self.module, datamodule=self.data, ckpt_path=str(self.checkpoint), verbose=False)
        except MisconfigurationException as error:  # such as a split without a loader
            raise UserError(" ".join(str(error).split())) from None
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            reason = " ".join(str(error).split())
            raise UserError(f"{self.checkpoint}: {reason}; use the code that wrote it") from None


def _batch_of(cfg: DictConfig, batch_size: int | None) -> Batch:
    """Return how the ranks that are here share samples, without accumulation."""
    ranks = Ranks.from_environment()
    trained: Any = cfg.get("batch") or {}
    share = (trained.get("global_size") or 1) // ranks.world_size
    usual = trained.get("micro_size") or max(1, share)
    batch = Batch(micro_size=batch_size or usual)
    return batch.spread_over(ranks.local_world_size, ranks.num_nodes)


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


class Counter(Callback):
    """Adds what a function counts in each micro-batch, over all ranks.

    Args:
        count: returns the number of a micro-batch.
    """

    def __init__(self, count: Callable[[Any], Tensor]) -> None:
        self.of_all_ranks = 0
        self._count = count
        self._counts: list[Tensor] = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count one micro-batch."""
        self._counts.append(self._count(batch))

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


def of_text(
    model: nn.Module, tokenizer: Tokenizer, path: str, batch_size: int, block_size: int
) -> dict[str, float]:
    """Measure a model on all tokens of text files but the first, which no token comes before.

    Args:
        model: returns the mean loss of tokens and targets, each (B, T), in nats, on its device.
        tokenizer: of the model.
        path: a file, a folder, a glob, or a URL.
        batch_size: windows at a time; with several ranks, on each.
        block_size: tokens of a window, T.

    Returns:
        `loss`, `perplexity`, and `bits_per_byte`, and the number of targets, `tokens`.

    Raises:
        UserError: there are no files, or they aren't text.
    """
    source = Text(path=path)
    # Whole, not divided.
    source.file_groups = [find_files(path, setting="--data", split="test", texts=True)]
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
    windows = -(-(len(ids) - 1) // block_size)  # rounded up
    ranks = Ranks.from_environment()
    firsts = range(ranks.rank * batch_size, windows, ranks.world_size * batch_size)
    numbers = [range(first, min(first + batch_size, windows)) for first in firsts]
    with torch.inference_mode():
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


def _measure(model: nn.Module, batches: Iterator[Pair], count: int) -> dict[str, float]:
    """Return loss, perplexity, and the number of targets, over the batches of all ranks.

    Args:
        model: on the device of the batches.
        batches: of this rank.
        count: how many there are, for the progress bar of rank 0, which only a terminal shows.
    """
    mean = Mean("loss", also={"perplexity": perplexity})
    disable = None if Ranks.from_environment().rank == 0 else True
    for tokens, targets in tqdm(batches, "evaluating", count, leave=False, disable=disable):
        mean.update(model(tokens, targets), weight=(targets != IGNORE).sum())
    ranks = entries_of_ranks({"loss": mean})["loss"]
    counted = sum(weight for entries in ranks for _, weight in entries)
    return {**mean.columns(ranks), "tokens": int(counted)}
