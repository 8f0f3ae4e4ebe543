"""What a rank keeps in its device's memory, predicted from shapes alone.

The model runs forward and backward once on tensors that have a shape and no content ("fake", on
the meta device), while every storage is counted from its birth to its death. That is done for a
few small shapes; activations are linear in the micro-batch, in the depth and in the vocabulary, so
these give the line on which every size lies. It is linear as soon as the activations of blocks make
the peak: the sums of gradients with which backward ends are larger in very small shapes only.
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

from lockstep_gpt.config import Config, ModelConfig, OptimConfig
from lockstep_gpt.extras.cluster.sharing import Sharing
from lockstep_gpt.model import functional
from lockstep_gpt.model.gpt import GPT, build_gpt
from lockstep_gpt.training.optim import build_optimizer

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
WIDER = 64  # ids by which a vocabulary is widened to see what it costs; models pad to multiples
FEWEST, MOST = 2, 512  # samples of the shapes that are tried
CHUNKED = 8  # bytes of a logit in a chunk: its logarithm in float32, and its gradient beside
BENT = 0.01  # how much more a sample may take than the one before, on what counts as a line
_FILLED_AT_RANDOM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, by part; all of them together are the peak."""

    weights: float
    gradients: float
    optimizer: float
    buckets: float  # copies of the gradients that DDP reduces, where they are not views of them
    gathered: float  # under fsdp2: weights of other ranks, and gradients on their way to them
    copies: float  # of weights in half precision, and of gradients on their way
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
        """Count the parameters of `model`, each in its own type, as are gradients and moments."""
        size = sum(weight.nbytes for weight in model.parameters())
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        moments = sum(
            # AdamW keeps the means of gradients and of their squares, Muon one momentum.
            (1 if group.get("muon") else 2) * sum(weight.nbytes for weight in group["params"])
            for group in build_optimizer(model, config, lr=config.lr).param_groups
        )
        return cls(size, trained, moments)

    def shared(self, world_size: int) -> States:
        """Return the share of one of several ranks."""
        sizes = (self.weights, self.gradients, self.optimizer)
        return States(*(math.ceil(size / world_size) for size in sizes))


@dataclass(frozen=True)
class Chunks:
    """Logits on a GPU, which are whole up to a size of the micro-batch and in chunks from there."""

    most_whole: int  # samples
    whole: float  # bytes per sample, as long as they are whole
    chunk: float  # bytes, whatever the micro-batch

    @classmethod
    def of(cls, config: Config, width: int, memory: float) -> Chunks:
        """Return what a device of so much memory does.

        Args:
            config: the run's settings.
            width: V padded.
            memory: bytes of the device.
        """
        each = config.model.block_size * width
        size = 2 if config.precision in AUTOCAST else 4
        chunk = functional.GPU_CHUNK_LOGITS * CHUNKED
        if config.compile:  # the logits and their gradient
            return cls(int(functional.WHOLE_SHARE * memory / 4 / each), 2 * size * each, chunk)
        return cls(functional.GPU_CHUNK_LOGITS // each, CHUNKED * each, chunk)

    def size(self, micro_size: int) -> float:
        """Return the bytes of a micro-batch."""
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
    chunks: Chunks = NO_CHUNKS  # of logits, beside

    def shared(self, sharing: Sharing, world_size: int) -> Footprint:
        """Return what each of several ranks has if they share the states."""
        return replace(self, states=self.states.shared(world_size), gathered=sharing.gathered)

    def memory(self, micro_size: int, context: float, bucket_copies: bool) -> Memory:
        """Return the peak of a rank that takes `micro_size` samples at a time.

        Gradients count as all there, as they are under DDP and from the second micro-step on.
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
        """Return how many samples fit into `memory` bytes; 0 if not even one does."""
        room = memory - self.memory(0, context, bucket_copies).total + self.chunks.size(0)
        each = self.activations + self.logits
        chunked = int((room - self.chunks.chunk) // each)
        if chunked > self.chunks.most_whole:
            return chunked
        return max(0, min(self.chunks.most_whole, int(room // (each + self.chunks.whole))))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are born inside it, while they live.

    Args:
        before: tensors that are there already; operations return views of them.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in before}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against being compiled costs a second of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count what it returns."""
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
    """Leaves weights as they are: without content there is nothing to draw."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _FILLED_AT_RANDOM else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Have other values in a module.

    Not by a TorchFunctionMode: backward, which may compute blocks again, would not be in it.
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
    """Compute as on a GPU, on tensors of a CPU.

    The fused attention is taken at any length, and with dropout, whose mask backward draws anew.

    Args:
        whole_logits: how many may be there at once.
        chunk_logits: of more than that, how many are.
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
    """Build a GPT without drawing its weights."""
    with _Uninitialized():  # type: ignore[no-untyped-call]
        return built(shape, vocab_size, precision)


def built(shape: ModelConfig, vocab_size: int, precision: str) -> GPT:
    """Build a GPT whose weights are of the type that training in `precision` has."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "64-true" else usual)
    try:
        return build_gpt(shape, vocab_size)
    finally:
        torch.set_default_dtype(usual)


def whole_model(config: Config, vocab_size: int) -> GPT:
    """Build the configured model on the meta device: with shapes, without content."""
    with torch.device("meta"):
        return shaped(config.model, vocab_size, config.precision)


def footprint(
    config: Config,
    model: GPT,
    accelerator: str,
    half_blocks: bool = False,
    memory: float = 0,
) -> Footprint:
    """Predict the memory of training `model` as `config` says.

    Args:
        config: the run's settings.
        model: what `whole_model` built from them.
        accelerator: cuda or cpu, whose attention kernels differ.
        half_blocks: blocks compute in bfloat16 altogether, as under strategy.param_dtype=bfloat16.
        memory: bytes of a GPU, by which the loss chooses how it is computed.
    """

    @cache
    def peak(micro_size: int, n_layer: int, vocab_size: int) -> int:
        shape = replace(config.model, n_layer=n_layer)
        precision = config.precision
        return trace_peak(shape, vocab_size, micro_size, precision, accelerator, half_blocks)

    few = FEWEST
    while few < MOST:  # a model that is not deep may peak at its end, when only gradients are left
        first, second, third = (peak(few + more, 1, model.vocab_size) for more in range(3))
        stream = 2 * config.model.block_size * config.model.n_embd  # bytes of a sample, at least
        if stream <= third - second <= (1 + BENT) * (second - first):
            break
        few *= 2

    def line(n_layer: int, vocab_size: int = model.vocab_size) -> tuple[float, float]:
        """Return bytes per sample and bytes beside."""
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
    """Return the most bytes alive at once in a forward and backward, weights and gradients apart.

    Args:
        shape: of the model.
        vocab_size: V.
        micro_size: samples, each of `block_size` tokens.
        precision: Lightning's name of the arithmetic.
        accelerator: cuda or cpu.
        half_blocks: weights of blocks, and what passes through them, are bfloat16.
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
    """Make weights of `block` bfloat16, and the activations that enter it."""
    for part in block.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(weight.detach().bfloat16()))
    block.register_forward_pre_hook(
        lambda _, values: tuple(value.bfloat16() for value in values)  # activations alone
    )


def _drop_gradient(weight: Tensor) -> None:
    """Forget a gradient that is whole: it goes where `States` has counted its place already."""
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
