"""A training step on a GPU, kernel by kernel: bytes, operations, and waits of the host.

The step runs on tensors that have a shape but no content; `kernels.py` records it. A kernel takes
as long as its operations or its bytes, whichever is longer; `hardware.py` has the fractions of the
peaks that are reached. A step takes as long as its kernels, or as long as the host needs to launch
them. There is no other model of time: `plan` uses this one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster.hardware import Hardware
from lockstep_gpt.extras.cluster.kernels import MODEL, MUON, SUMS, UPDATE, Kernel, Recorder
from lockstep_gpt.extras.cluster.tracing import as_on_a_gpu, changed, shaped, step
from lockstep_gpt.model import functional
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training import matrix_placement, orthogonalization
from lockstep_gpt.training.optim import build_optimizer


@dataclass(frozen=True)
class Ledger:
    """The kernels of a micro-batch and of an update, with the number of each.

    Numbers for deep models are extrapolated from two shallow ones, so they may be negative.
    """

    kernels: Counter[Kernel]
    waits: int = 0  # how often the host waits for the device

    def of(self, *parts: str) -> Ledger:
        """Return the ledger of some parts of the step."""
        kernels = {kernel: times for kernel, times in self.kernels.items() if kernel.part in parts}
        return replace(self, kernels=Counter(kernels))

    def total(self, name: str) -> float:
        """Add up `read`, `written` or `flops`."""
        return float(sum(times * getattr(kernel, name) for kernel, times in self.kernels.items()))

    @property
    def moved(self) -> float:
        """Bytes moved between memory and processors."""
        return self.total("read") + self.total("written")

    def seconds(self, hardware: Hardware) -> float:
        """Return how long the device takes."""
        return sum(times * kernel.seconds(hardware) for kernel, times in self.kernels.items())

    def compute(self, accumulation: int, hardware: Hardware) -> float:
        """Return the seconds of a step's micro-batches, limited by the device or by the host."""
        model = self.of(*MODEL)
        sums = self.of(SUMS)
        device = accumulation * model.seconds(hardware)
        device += (accumulation - 1) * sums.seconds(hardware)
        launched = accumulation * model.kernels.total() + (accumulation - 1) * sums.kernels.total()
        return max(device, launched * hardware.launch)

    def deeper(self, other: Ledger, times: int) -> Ledger:
        """Return this ledger plus `times` times the difference from it to `other`."""
        kernels = Counter(self.kernels)
        for kernel in {*self.kernels, *other.kernels}:
            kernels[kernel] += times * (other.kernels[kernel] - self.kernels[kernel])
        return Ledger(kernels, self.waits + times * (other.waits - self.waits))


def ledger(config: Config, vocab_size: int, micro_size: int, memory: float | None = None) -> Ledger:
    """Return the ledger of training on a GPU.

    Args:
        config: the run's settings.
        vocab_size: V.
        micro_size: samples per micro-batch.
        memory: the device's memory in bytes, which decides how the loss is computed.
    """
    shapes = (replace(config.model, n_layer=layers) for layers in (1, 2))
    one, two = (trace(config, shape, vocab_size, micro_size, memory) for shape in shapes)
    return one.deeper(two, config.model.n_layer - 1)


def trace(
    config: Config,
    shape: ModelConfig,
    vocab_size: int,
    micro_size: int,
    memory: float | None = None,
) -> Ledger:
    """Return the ledger of a model of this shape; `ledger` explains the other arguments."""
    recorder = Recorder(config.compile)
    with FakeTensorMode():
        model = shaped(shape, vocab_size, config.precision)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        recorder.sums = set(recorder.sizes(weight.grad for weight in weights))
        optimizer = build_optimizer(model, config.optim, lr=config.optim.lr)
        with changed(orthogonalization, product_type=lambda _: torch.bfloat16):  # as on GPUs
            with Recorder():
                optimizer.step()  # creates its moments, which must exist from now on
            _record(recorder, model, optimizer, config, micro_size, memory)
    return Ledger(Counter(recorder.kernels([weight.grad for weight in weights])), recorder.waits)


def _record(
    recorder: Recorder,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    config: Config,
    micro_size: int,
    memory: float | None,
) -> None:
    groups = optimizer.param_groups
    counts = [
        optimizer.state[weight]["step"]  # Muon's counters are on the host
        for group in groups
        if group.get("muon")
        for weight in group["params"]
    ]
    recorder.host = {*recorder.sizes(counts)}
    whole_logits = 0.0  # the most logits that compiled code computes at once
    if config.compile:
        whole_logits = functional.WHOLE_SHARE * (memory or 0) / 4
    gpu = as_on_a_gpu(max(whole_logits, functional.MANY_LOGITS), functional.GPU_CHUNK_LOGITS)
    with gpu, recorder, recorder.watching(model):
        step(model, micro_size, config.model.block_size, config.precision)
        recorder.enter(UPDATE, eager=True)
        if config.optim.clip_norm is not None:
            weights = [weight for group in groups for weight in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, config.optim.clip_norm)
        with _watching_muon(recorder, eager=config.batch.exact_micro_size is not None):
            optimizer.step()


@contextlib.contextmanager
def _watching_muon(recorder: Recorder, eager: bool) -> Iterator[None]:
    """Record which part of the step Muon's functions belong to; compiled code, unless `eager`."""

    def in_part(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            recorder.enter(part, eager=eager)
            result = function(*arguments)
            recorder.enter(UPDATE, eager=True)
            return result

        return call

    with changed(
        matrix_placement,
        updates_of=in_part(MUON, matrix_placement.updates_of),
        add_updates=in_part(UPDATE, matrix_placement.add_updates),
    ):
        yield
