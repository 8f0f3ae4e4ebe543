"""What all rungs share: the settings, the prepared data in its order, and the record of a run.

The model, optimizer, schedule, and data are those of `lockstep_gpt`.
The settings are the same too: the overrides that you give to `lockstep-gpt train`
also work after the name of each rung.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from hydra.utils import instantiate
from lockstep.batch import Batch
from lockstep.building import build
from lockstep.errors import UserError
from lockstep.launch.flags import each_job
from lockstep.launch.main import training
from lockstep.loading.order import spread
from lockstep.processes import end_process
from lockstep.schedule import Schedule, scaled_lr
from lockstep.strategies.matrix_products import choose_matrix_products
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import Index, load_index
from lockstep.tokens.windows import Batch as Pair
from lockstep.tokens.windows import StreamWindows, read_windows
from omegaconf import DictConfig
from sampler import EpochSampler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lockstep_gpt.language_model import LanguageModel

# Make the command's runs comparable with the rungs: log each step, validate once at the end.
# 21 validation windows do not fill a whole number of batches of 8, so an average must be weighted.
SETTINGS = (
    "experiment=smoke",
    "max_steps=50",
    "val_every=50",
    "val_tokens=672",
    "log_every=1",
    "checkpoint.every=null",
    "logger=none",
)
COLUMNS = (  # as in metrics.csv, except for the last
    "trainer/step",
    "train/loss",
    "throughput/step_seconds",
    "val/loss",
    "val/mean_of_means",
)
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.float32}


@dataclass(frozen=True)
class Experiment:
    """One run as the `words` of the command line describe it, on `world_size` ranks."""

    config: DictConfig
    batch: Batch
    schedule: Schedule
    folder: Path  # folder of the prepared data
    device_type: str  # cpu or cuda

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return DTYPES[self.config.precision]

    @property
    def mixed(self) -> bool:
        """Whether forward and loss run in bfloat16 over float32 weights."""
        return self.config.precision == "bf16-mixed"

    @cached_property
    def index(self) -> Index:
        """The index of the prepared folder."""
        return load_index(self.folder)

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.index.tokenizer["vocab_size"])

    def new_model(self) -> LanguageModel:
        """Return the model; its weights are drawn with torch's seed."""
        model: LanguageModel = build(self.config.model, vocab_size=self.vocab_size)
        return model

    def new_optimizer(self, module: nn.Module) -> Optimizer:
        """Return the optimizer of a module's weights, with the rate of this batch."""
        make = instantiate(self.config.optim)
        optimizer: Optimizer = make(module.named_parameters(), lr=self.schedule.peak)
        return optimizer

    def training_set(self) -> Windows:
        """Return every window of the training split."""
        size = self.index.windows("train", self.config.model.block_size)
        return Windows(self, "train", np.arange(size))

    def sampler(self, size: int, rank: int = 0, world_size: int = 1) -> EpochSampler:
        """Return a sampler of a rank's part of an epoch of `size` windows, in the command's order.

        There is one difference: the command's batches continue across the end of an epoch; these
        drop the tail.
        """
        return EpochSampler(size, self.config.seed, rank, world_size, self.batch.micro_size)

    def validation_set(self) -> Windows:
        """Return the windows that the command validates on, spread evenly over the split."""
        T = self.config.model.block_size
        limit = self.config.val_tokens
        size = self.index.windows("val", T)
        count = size if limit is None else min(size, max(1, limit // T))
        return Windows(self, "val", spread(np.arange(count), size, count))


class Windows(Dataset[Pair]):
    """The windows `rows` of a split; a whole batch is gathered at once."""

    def __init__(self, experiment: Experiment, split: str, rows: np.ndarray) -> None:
        self.windows = StreamWindows(experiment.folder, split, experiment.config.model.block_size)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, numbers: list[int]) -> Pair:
        return read_windows(self.windows, self.rows[numbers])

    def batches(self, size: int, rank: int = 0, world_size: int = 1) -> Iterator[Pair]:
        """Yield batches of every `world_size`-th window from `rank`; the last may be smaller."""
        rows = list(range(len(self)))[rank::world_size]
        for first in range(0, len(rows), size):
            yield self.__getitems__(rows[first : first + size])


def as_it_is(batch: Pair) -> Pair:
    """Replace `DataLoader`'s collation: batches are already gathered whole."""
    return batch


def micro_batches(loader: DataLoader[Pair], sampler: EpochSampler, done: int) -> Iterator[Pair]:
    """Yield micro-batches forever, after the first `done` of the run; each epoch reshuffles."""
    epoch, skip = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            if number >= skip:
                yield batch
        epoch = epoch + 1
        skip = 0


class Record:
    """Losses and seconds of each step: printed every 10 steps, and all written to a CSV file."""

    def __init__(self, experiment: Experiment, path: Path | None) -> None:
        self.total = experiment.schedule.steps
        self.path = path
        self.rows: list[dict[str, float]] = []
        self.clock = time.perf_counter()

    def add(self, step: int, loss: float) -> None:
        """Record the loss of `step`, and the time since the previous one."""
        now = time.perf_counter()
        self.rows.append(dict(zip(COLUMNS, (step, loss, now - self.clock), strict=False)))
        self.clock = now
        if step % 10 == 0 or step == self.total:
            print(f"step {step}/{self.total}  loss {loss:.4f}", flush=True)

    def close(self, val_loss: float, mean_of_means: float | None = None) -> None:
        """Record the validation loss, and write the file."""
        wrong = f" (the mean of the batches' means is {mean_of_means:.4f})" if mean_of_means else ""
        print(f"val_loss {val_loss:.4f}{wrong}", flush=True)
        if self.path:
            last = {"val/loss": val_loss, "val/mean_of_means": mean_of_means}
            with self.path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows([*self.rows[:-1], {**self.rows[-1], **last}])


def load(words: Sequence[str], world_size: int) -> Experiment:
    """Compose `words` as the command does, prepare the data, and choose the device.

    Raises:
        UserError: a setting is wrong, or asks for something that the rungs do not support.
    """
    (config,) = each_job(training(), [*SETTINGS, *words], lambda config: config)
    if config.precision not in DTYPES:
        raise UserError(f"precision={config.precision} is not one of {', '.join(DTYPES)}")
    accelerator = config.trainer.accelerator
    device_type = "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    if device_type == "cpu" and accelerator in ("gpu", "cuda"):
        raise UserError("trainer=gpu but torch finds no CUDA device; set trainer=cpu")
    choose_matrix_products(device_type)
    batch = build(config.batch).spread_over(world_size)
    peak = scaled_lr(config.optim.lr, batch, config.lr_scaling)
    schedule = build(config.schedule, steps=config.max_steps, peak=peak)
    source = replace(build(config.data.source), root=config.data.root)
    return Experiment(config, batch, schedule, prepare(source), device_type)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of every rung's flags; arguments that it does not know are settings."""
    flags = argparse.ArgumentParser(description=description, epilog="other arguments are settings")
    flags.add_argument("--metrics", type=Path, help="write the loss of each step to this CSV file")
    flags.add_argument(
        "--checkpoint", type=Path, help="resume from it, if it exists; save at the end"
    )
    flags.add_argument("--until", type=int, help="end after this step, as if interrupted")
    return flags


def main(rung: Callable[[], None]) -> None:
    """Run a rung, and end the process; print a user's mistake as one line.

    The interpreter does not shut down normally: gloo's threads may still use tensors then, and
    torch sometimes aborts (pytorch#179291).
    """
    try:
        rung()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    end_process(0)


def totals(losses: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Add up `(mean loss, samples)` of batches, for an all-reduce over ranks: float64, shape (4).

    The values are the sum over samples and their count, whose quotient is the mean; and the sum of
    the batches' means and their count, whose quotient differs if batches differ in size.
    """
    means = torch.stack([loss.double() for loss, _ in losses])
    counts = means.new_tensor([count for _, count in losses])
    ones = torch.ones_like(means)
    return torch.stack([means @ counts, counts.sum(), means.sum(), ones.sum()])
