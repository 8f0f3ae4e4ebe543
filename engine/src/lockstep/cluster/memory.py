"""Predict a rank's device memory from shapes alone.

The model runs forward and backward once on tensors that have a shape but no content ("fake", on
the meta device), while every storage is counted from its creation until it is freed. This is done
for a few small shapes. Activations are linear in the micro-batch, the depth, and the vocabulary, so
these shapes determine every other size. It is linear once the activations of blocks make the peak;
only in very small shapes are the sums of gradients at the end of backward larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim import Optimizer

from lockstep import functional
from lockstep.cluster.choices import with_values
from lockstep.cluster.sharing import Sharing, optimizer_of
from lockstep.cluster.tracing import AUTOCAST, LanguageModel, shaped, trace_peak

WIDER = 64  # ids added to the vocabulary to measure their cost; models pad to multiples
FEWEST, MOST = 2, 512  # samples of the shapes that are traced
CHUNKED = 8  # bytes per logit in a chunk: its logarithm in float32, and its gradient
BENT = 0.01  # a sample may take this fraction more than the one before, and still count as linear


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
    def of(cls, model: nn.Module, optim: DictConfig) -> States:
        """Count the bytes of `model`'s parameters, gradients, and moments, each in its own type."""
        size = sum(weight.nbytes for weight in model.parameters())
        trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
        return cls(size, trained, moment_bytes(optimizer_of(optim, model)))

    def shared(self, world_size: int) -> States:
        """Return the shard of one of `world_size` ranks."""
        sizes = (self.weights, self.gradients, self.optimizer)
        return States(*(math.ceil(size / world_size) for size in sizes))


@dataclass(frozen=True)
class Chunks:
    """Logits on a GPU: they are whole up to a certain micro-batch, and in chunks above it."""

    most_whole: int  # samples in the largest micro-batch with whole logits
    bytes_per_sample: float  # if they are whole
    chunk: float  # bytes, for any micro-batch

    @classmethod
    def of(cls, config: DictConfig, width: int, memory: float) -> Chunks:
        """Return how a device with this much memory computes logits.

        Args:
            config: the run's settings.
            width: V, padded.
            memory: the device's memory in bytes.
        """
        logits = config.model.block_size * width
        size = 2 if config.precision in AUTOCAST else 4
        chunk = functional.GPU_CHUNK_LOGITS * CHUNKED
        if config.compile:  # the logits and their gradient
            return cls(int(functional.WHOLE_SHARE * memory / 4 / logits), 2 * size * logits, chunk)
        return cls(functional.GPU_CHUNK_LOGITS // logits, CHUNKED * logits, chunk)

    def size(self, micro_size: int) -> float:
        """Return the bytes for a micro-batch."""
        if micro_size <= self.most_whole:
            return micro_size * self.bytes_per_sample
        return self.chunk


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
        per_sample = self.activations + self.logits
        chunked = int((room - self.chunks.chunk) // per_sample)
        if chunked > self.chunks.most_whole:
            return chunked
        with_whole_logits = int(room // (per_sample + self.chunks.bytes_per_sample))
        return max(0, min(self.chunks.most_whole, with_whole_logits))


def moment_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the moments that an optimizer keeps of its weights.

    AdamW has a mean of gradients and one of their squares; Muon has a single momentum.
    """
    size = 0
    for group in optimizer.param_groups:
        moments = 1 if group.get("muon") else 2
        size += sum(moments * weight.nbytes for weight in group["params"])
    return size


def whole_model(config: DictConfig, vocab_size: int) -> LanguageModel:
    """Build the configured model on the meta device: with shapes but without content."""
    with torch.device("meta"):
        return shaped(config.model, vocab_size, config.precision)


def _linear_from(peak: Callable[[int], int], least: int) -> int:
    """Return a number of samples from which on the peak is linear, at most `MOST`.

    A shallow model may peak at the end of backward, when only gradients are left.

    Args:
        peak: returns the most bytes alive at once for a number of samples.
        least: the fewest bytes that another sample takes.
    """
    few = FEWEST
    while few < MOST:
        first, second, third = (peak(few + more) for more in range(3))
        if least <= third - second <= (1 + BENT) * (second - first):
            break
        few *= 2
    return few


def footprint(
    config: DictConfig,
    model: LanguageModel,
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
        shape = with_values(config.model, n_layer=n_layer)
        kind = (config.precision, accelerator, half_blocks)
        return trace_peak(shape, vocab_size, micro_size, *kind)

    stream = 2 * config.model.block_size * config.model.n_embd  # the fewest bytes of a sample
    few = _linear_from(lambda micro_size: peak(micro_size, 1, model.vocab_size), stream)

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
