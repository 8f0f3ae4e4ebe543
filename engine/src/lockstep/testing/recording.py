"""A callback that records what each step was computed from, to find where two runs part."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lockstep.patches.torch import BatchNorm
from lockstep.testing.results import bits_of

PROBES = 32  # values of a tensor that are kept


class Record(Callback):
    """Writes a line for each optimizer step to `FOLDER/RANK.jsonl`, one file per rank.

    A line has: digests of the samples of each micro-batch; the states of random number generators
    before and after it; its loss; the gradients before the update; the rates; the weights after it.
    A step that is repeated after a restart has a later line, which counts.

    Args:
        folder: for the files; an existing one.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._micro_batches: list[dict[str, Any]] = []  # of the current step
        self._update: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the weights to begin with, as those of the step before."""
        self._step = trainer.global_step
        self._write(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the samples of a micro-batch, and what random numbers it will draw."""
        self._micro_batches.append({"samples": samples_of(batch), "before": random_states()})

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Note the loss, which Lightning has divided."""
        self._micro_batches[-1]["loss"] = loss.detach().item() * trainer.accumulate_grad_batches

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note the gradients, which are complete, and the rates."""
        gradients = {
            name: probe(weight.grad)
            for name, weight in pl_module.named_parameters()
            if weight.grad is not None
        }
        rates = [float(group["lr"]) for each in trainer.optimizers for group in each.param_groups]
        self._update = {"gradients": gradients, "rates": rates}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note what was drawn; write the step if this was its last micro-batch."""
        self._micro_batches[-1]["after"] = random_states()
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = {name: probe(weight) for name, weight in pl_module.named_parameters()}
        buffers = {name: probe(buffer) for name, buffer in pl_module.named_buffers()}
        batch_norms = [
            name
            for name, layer in pl_module.named_modules()
            if isinstance(layer, BatchNorm) and layer.training
        ]
        line = {
            "step": self._step,
            "micro_batches": self._micro_batches,
            **self._update,
            "weights": weights,
            "buffers": buffers,
            "batch_norms": batch_norms,
        }
        self._micro_batches = []
        self._update = {}
        with (self.folder / f"{trainer.global_rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def samples_of(batch: Any) -> list[str]:
    """Return a digest of each sample of a batch of any nesting, in its order.

    Padding of a sequence depends on the others in its micro-batch, so a run of equal values at a
    sample's end counts once.
    """
    leaves = [*_leaves(batch, "")]
    sizes = [len(leaf) for _, leaf in leaves]
    count = max(set(sizes), key=sizes.count, default=0)
    parts = [(name, leaf) for name, leaf in leaves if len(leaf) == count]
    return [
        _digest([piece for name, leaf in parts for piece in (name.encode(), _row(leaf[i]))])
        for i in range(count)
    ]


def _leaves(batch: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what has a row for each sample: tensors, arrays, and lists of plain values."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield name, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _leaves(value, f"{name}.{key}")
    elif isinstance(batch, list | tuple):
        if batch and isinstance(batch[0], str | bytes | int | float):
            yield name, batch
        else:
            for i, value in enumerate(batch):
                yield from _leaves(value, f"{name}.{i}")
    elif hasattr(batch, "__dict__"):  # a dataclass, or a batch of a library
        yield from _leaves(vars(batch), name)


def _row(value: Any) -> bytes:
    if not isinstance(value, Tensor | np.ndarray):
        return repr(value).encode()
    numbers = torch.as_tensor(value).detach().cpu().reshape(-1)
    if not len(numbers):
        return b""
    differs = (numbers != numbers[-1]).nonzero()
    end = int(differs[-1]) + 2 if len(differs) else 1
    return bits_of(numbers[:end])


def random_states() -> dict[str, str]:
    """Return a digest of each generator's state in this process, by the generator's name."""
    states = {
        "torch": bits_of(torch.get_rng_state()),
        "NumPy": pickle.dumps(np.random.get_state()),  # noqa: NPY002 (an owner's code may use it)
        "Python": repr(random.getstate()).encode(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["CUDA"] = bits_of(torch.cuda.get_rng_state())
    return {name: _digest([state]) for name, state in states.items()}


def probe(tensor: Tensor) -> list[Any]:
    """Return a digest of a tensor's bits, its largest magnitude, and some of its values."""
    whole: Any = tensor.detach()
    if isinstance(whole, DTensor):  # of all ranks, which all call this
        whole = whole.full_tensor()
    if whole.is_sparse:
        whole = whole.to_dense()
    values = whole.cpu().reshape(-1)
    if not len(values):
        return ["", 0.0, []]
    places = torch.linspace(0, len(values) - 1, min(PROBES, len(values)), dtype=torch.float64)
    some = values[places.long()].double().tolist()
    return [_digest([bits_of(values)]), float(values.abs().max()), some]


def _digest(parts: list[bytes]) -> str:
    blake = hashlib.blake2b(digest_size=8)
    for part in parts:
        blake.update(len(part).to_bytes(8))
        blake.update(part)
    return blake.hexdigest()
