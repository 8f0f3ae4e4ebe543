"""Predict a rank's device memory from shapes alone.

The model runs forward and backward once on tensors that have a shape but no content ("fake", on
the meta device), while every storage is counted from its creation until it is freed. This is done
for a few small shapes. Activations are linear in the micro-batch, the depth, and the vocabulary, so
these shapes determine every other size. It is linear once the activations of blocks make the peak;
only in very small shapes are the sums of gradients at the end of backward larger.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster.sharing import Sharing
from lockstep_gpt.model import functional
from lockstep_gpt.model.gpt import GPT, build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.training.optim import build_optimizer
from lockstep_gpt.training.optim_settings import OptimConfig

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WIDER = 64  # ids added to the vocabulary to measure their cost; models pad to multiples
FEWEST, MOST = 2, 512  # samples of the shapes that are traced
CHUNKED = 8  # bytes per logit in a chunk: its logarithm in float32, and its gradient
BENT = 0.01  # a sample may take this fraction more than the one before, and still count as linear
_FILLED_AT_RANDOM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by part; their sum is the peak."""

    weights: float
    gradients: float
    optimizer: float
    buckets: float  # DDP's copies of the gradients, if the gradients are not views of its buckets
    gathered: float  # under fsdp2: weights from other ranks, and gradients to be sent to them
    copies: float  # of weights in half precision, and of gradients in transit
    activations: float
    logits: float
    context: float

    @property
    def total(self) -> float:
        """The peak of one optimizer step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True)
class States:
    """Bytes that do not depend on the batch (Rajbhandari et al. 2020, section 3.1)."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, model: nn.Module, config: OptimConfig) -> States:
        """Count the bytes of `model`'s parameters, gradients, and moments, each in its own type."""
        size = sum(weight.nbytes for weight in model.parameters())
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        moments = sum(
            # AdamW keeps running means of gradients and of their squares; Muon keeps one momentum.
            (1 if group.get("muon") else 2) * sum(weight.nbytes for weight in group["params"])
            for group in build_optimizer(model, config, lr=config.lr).param_groups
        )
        return cls(size, trained, moments)

    def shared(self, world_size: int) -> States:
        """Return the shard of one of `world_size` ranks."""
        sizes = (self.weights, self.gradients, self.optimizer)
        return States(*(math.ceil(size / world_size) for size in sizes))


@dataclass(frozen=True)
class Chunks:
    """Logits on a GPU: they are whole up to a certain micro-batch, and in chunks above it."""

    most_whole: int  # samples in the largest micro-batch with whole logits
    whole: float  # bytes per sample, if they are whole
    chunk: float  # bytes, for any micro-batch

    @classmethod
    def of(cls, config: Config, width: int, memory: float) -> Chunks:
        """Return how a device with this much memory computes logits.

        Args:
            config: the run's settings.
            width: V, padded.
            memory: the device's memory in bytes.
        """
        each = config.model.block_size * width
        size = 2 if config.precision in AUTOCAST else 4
        chunk = functional.GPU_CHUNK_LOGITS * CHUNKED
        if config.compile:  # the logits and their gradient
            return cls(int(functional.WHOLE_SHARE * memory / 4 / each), 2 * size * each, chunk)
        return cls(functional.GPU_CHUNK_LOGITS // each, CHUNKED * each, chunk)

    def size(self, micro_size: int) -> float:
        """Return the bytes for a micro-batch."""
        return micro_size * self.whole if micro_size <= self.most_whole else self.chunk


NO_CHUNKS = Chunks(0, 0, 0)


@dataclass(frozen=True)
class Footprint:
    """The memory of a model as a function of the micro-batch."""

    states: States
    copies: float
    activations: float  # per sample
    logits: float  # per sample
    gathered: float = 0
    chunks: Chunks = NO_CHUNKS  # of logits, in addition

    def shared(self, sharing: Sharing, world_size: int) -> Footprint:
        """Return the footprint of each of `world_size` ranks if the states are sharded."""
        return replace(self, states=self.states.shared(world_size), gathered=sharing.gathered)

    def memory(self, micro_size: int, context: float, bucket_copies: bool) -> Memory:
        """Return the peak memory of a rank with a micro-batch of `micro_size` samples.

        All gradients are counted, as under DDP and from the second micro-step on.
        """
        return Memory(
            weights=self.states.weights,
            gradients=self.states.gradients,
            optimizer=self.states.optimizer,
            buckets=self.states.gradients if bucket_copies else 0,
            gathered=self.gathered,
            copies=self.copies,
            activations=micro_size * self.activations,
            logits=micro_size * self.logits + self.chunks.size(micro_size),
            context=context,
        )

    def largest_micro_size(self, memory: float, context: float, bucket_copies: bool) -> int:
        """Return the most samples that fit in `memory` bytes at a time; 0 if not even one does."""
        room = memory - self.memory(0, context, bucket_copies).total + self.chunks.size(0)
        each = self.activations + self.logits
        chunked = int((room - self.chunks.chunk) // each)
        if chunked > self.chunks.most_whole:
            return chunked
        return max(0, min(self.chunks.most_whole, int(room // (each + self.chunks.whole))))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages created inside it, for as long as they exist.

    Args:
        before: tensors that already exist; operations return views of them.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in before}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default's guard against compilation costs a second of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._discount, key, storage.nbytes())

    def _discount(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


class _Uninitialized(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips random initialization: tensors without content need no values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _FILLED_AT_RANDOM else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Replace values in a module for a while.

    A TorchFunctionMode would not work: backward, which may recompute blocks, is not inside it.
    """
    usual = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(usual)


@contextlib.contextmanager
def as_on_a_gpu(
    whole_logits: float = functional.MANY_LOGITS, chunk_logits: int = functional.CHUNK_LOGITS
) -> Iterator[None]:
    """Compute as on a GPU, on CPU tensors.

    Fused attention is used at any length, and with dropout, whose mask backward draws again.

    Args:
        whole_logits: the most logits that may exist at once.
        chunk_logits: the number of logits in a chunk, if there are more.
    """
    usual = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return usual(*args, **{**kwargs, "dropout_p": 0.0})

    choices = {
        "SHORT": 0,
        "CHUNK_LOGITS": chunk_logits,
        "most_whole_logits": lambda _: whole_logits,
    }
    with changed(F, scaled_dot_product_attention=attention), changed(functional, **choices):
        yield


def shaped(shape: ModelConfig, vocab_size: int, precision: str) -> GPT:
    """Build a GPT without initializing its weights."""
    with _Uninitialized():  # type: ignore[no-untyped-call]
        return built(shape, vocab_size, precision)


def built(shape: ModelConfig, vocab_size: int, precision: str) -> GPT:
    """Build a GPT with weights of the type that training in `precision` uses."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "64-true" else usual)
    try:
        return build_gpt(shape, vocab_size)
    finally:
        torch.set_default_dtype(usual)


def whole_model(config: Config, vocab_size: int) -> GPT:
    """Build the configured model on the meta device: with shapes but without content."""
    with torch.device("meta"):
        return shaped(config.model, vocab_size, config.precision)


def footprint(
    config: Config,
    model: GPT,
    accelerator: str,
    half_blocks: bool = False,
    memory: float = 0,
) -> Footprint:
    """Predict the memory for training `model` under `config`.

    Args:
        config: the run's settings.
        model: built by `whole_model` from these settings.
        accelerator: cuda or cpu; their attention kernels differ.
        half_blocks: blocks compute entirely in bfloat16, as under strategy.param_dtype=bfloat16.
        memory: a GPU's memory in bytes, which decides how the loss is computed.
    """

    @cache
    def peak(micro_size: int, n_layer: int, vocab_size: int) -> int:
        shape = replace(config.model, n_layer=n_layer)
        precision = config.precision
        return trace_peak(shape, vocab_size, micro_size, precision, accelerator, half_blocks)

    few = FEWEST
    while few < MOST:  # a shallow model may peak at the end, when only gradients are left
        first, second, third = (peak(few + more, 1, model.vocab_size) for more in range(3))
        stream = 2 * config.model.block_size * config.model.n_embd  # the fewest bytes of a sample
        if stream <= third - second <= (1 + BENT) * (second - first):
            break
        few *= 2

    def line(n_layer: int, vocab_size: int = model.vocab_size) -> tuple[float, float]:
        """Return the bytes per sample, and the bytes that do not depend on the samples."""
        size = peak(few, n_layer, vocab_size)
        slope = peak(few + 1, n_layer, vocab_size) - size
        return slope, size - few * slope

    (slope, constant), (deeper_slope, deeper_constant) = line(1), line(2)
    wider_slope, _ = line(1, model.vocab_size + WIDER)
    more = config.model.n_layer - 1
    logits = (wider_slope - slope) / WIDER * model.vocab_size
    width = len(model.head)
    many = few * config.model.block_size * width > functional.MANY_LOGITS
    chunked = accelerator == "cuda" and many and config.precision != "16-mixed"
    return Footprint(
        states=States.of(model, config.optim),
        copies=constant + more * (deeper_constant - constant),
        activations=slope + more * (deeper_slope - slope) - logits,
        logits=logits,
        chunks=Chunks.of(config, width, memory) if chunked else NO_CHUNKS,
    )


def trace_peak(
    shape: ModelConfig,
    vocab_size: int,
    micro_size: int,
    precision: str,
    accelerator: str,
    half_blocks: bool = False,
) -> int:
    """Return the most bytes alive at once in forward and backward, without weights and gradients.

    Args:
        shape: the model's shape.
        vocab_size: V.
        micro_size: number of samples of `block_size` tokens.
        precision: Lightning's name for the precision.
        accelerator: cuda or cpu.
        half_blocks: the blocks' weights and activations are bfloat16.
    """
    with FakeTensorMode():
        model = shaped(shape, vocab_size, precision)
        for block in getattr(model, "blocks", ()) if half_blocks else ():
            _halve(block)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        attention = as_on_a_gpu() if accelerator == "cuda" else contextlib.nullcontext()
        count = LiveBytes(model.parameters())
        with attention, count:
            step(model, micro_size, shape.block_size, precision)
    return count.peak


def _halve(block: nn.Module) -> None:
    """Convert `block`'s weights, and the activations that enter it, to bfloat16."""
    for part in block.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(weight.detach().bfloat16()))
    block.register_forward_pre_hook(
        lambda _, values: tuple(value.bfloat16() for value in values)  # only activations are passed
    )


def _drop_gradient(weight: Tensor) -> None:
    """Drop a finished gradient; `States` has already counted its memory."""
    weight.grad = None


def step(model: GPT, micro_size: int, block_size: int, precision: str) -> None:
    """Run forward and backward once on `micro_size` samples of `block_size` tokens."""
    device = next(model.parameters()).device
    tokens = torch.zeros(micro_size, block_size, dtype=torch.int64, device=device)
    with _autocast(precision, device.type):
        loss = model(tokens, torch.zeros_like(tokens))
    loss.backward()


@contextlib.contextmanager
def _autocast(precision: str, device: str) -> Iterator[None]:
    with torch.autocast(device, AUTOCAST.get(precision), enabled=precision in AUTOCAST):
        yield
