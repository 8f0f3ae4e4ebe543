"""Predict a rank's device memory, and find settings with which a run fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property

from lockstep.batch import Batch, gradient_copies
from lockstep.errors import UserError
from lockstep.plan.counting import FEWEST, Device, Traced, trace
from lockstep.plan.hardware import Hardware
from lockstep.plan.sharing import BYTES, Ownership, Sharing
from lockstep.plan.training import Training
from lockstep.strategies.ddp import has_bucket_copies

MANY = 256  # samples of a micro-batch whose activations make the peak


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by part; their sum is the peak."""

    weights: float
    gradients: float
    optimizer: float
    buckets: float  # DDP's copies of the gradients, if the gradients are not views of its buckets
    gathered: float  # under fsdp2: weights from other ranks, and gradients to be sent to them
    sums: float  # of gradients, beside the gradients themselves
    activations: float  # what forward keeps for backward, and what exists only for a moment
    context: float

    @property
    def total(self) -> float:
        """The peak of one optimizer step."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True)
class Line:
    """Bytes as a function of the samples in a micro-batch."""

    constant: float
    slope: float

    def at(self, samples: int) -> float:
        """Return the bytes for a micro-batch."""
        return self.constant + self.slope * samples

    def most(self, room: float) -> float:
        """Return the samples that take so many bytes."""
        return (room - self.constant) // self.slope if self.slope > 0 else math.inf


@dataclass(frozen=True)
class Activations:
    """What a micro-batch takes: the largest of a few lines, one for each moment of a step.

    In small micro-batches, gradients or the loss may make the peak, in large ones the blocks. Our
    loss of tokens has all logits at once up to a certain micro-batch, and a chunk of them above it.
    """

    few: tuple[Line, ...]  # up to the bend
    many: tuple[Line, ...]  # above it
    bend: float  # the largest micro-batch with whole logits
    kernels: int  # that a micro-batch starts
    stream: int  # bytes of a sample between two blocks

    @classmethod
    def of(cls, training: Training, device: Device, half_blocks: bool = False) -> Activations:
        """Trace micro-batches of a few sizes."""

        @cache
        def traced(samples: int) -> Traced:
            what = (training.model, training.example, training.loss, samples, training.precision)
            return trace(*what, device, training.units, half_blocks)

        def lines(*sizes: int) -> tuple[Line, ...]:
            ends = [(size, traced(size).peak, traced(size + 1).peak) for size in sorted({*sizes})]
            return tuple(
                Line(peak - size * (more - peak), more - peak) for size, peak, more in ends
            )

        first = traced(FEWEST)
        stream = first.stream // FEWEST
        if not first.logits or training.precision == "16-mixed":  # whose logits are always whole
            only = lines(FEWEST, MANY)
            return cls(only, only, math.inf, first.kernels, stream)
        bend = device.whole_logits * FEWEST // first.logits
        above = max(FEWEST, bend + 1)
        many = lines(above, max(above, MANY))
        few = lines(FEWEST, min(MANY, bend - 1)) if bend > FEWEST else many
        return cls(few, many, bend, first.kernels, stream)

    def at(self, samples: int) -> float:
        """Return the bytes for a micro-batch."""
        return max(line.at(samples) for line in (self.few if samples <= self.bend else self.many))

    def largest(self, room: float) -> int:
        """Return the most samples that fit in so many bytes; 0 if not even one does."""
        few, many = (min(line.most(room) for line in lines) for lines in (self.few, self.many))
        return int(many if many > self.bend else max(0, min(self.bend, few)))


@dataclass(frozen=True)
class Remedy:
    """Settings with which a run fits."""

    words: str
    memory: float  # bytes on one device


@dataclass(frozen=True)
class Room:
    """The memory that a run needs on each device, for any number of devices.

    Args:
        training: what is trained.
        hardware: the devices.
        others: the same with other settings that may take less memory: words of a command line,
            with a space between two settings -> what is trained with them.
    """

    training: Training
    hardware: Hardware
    others: Mapping[str, Training] = field(default_factory=dict)

    @cached_property
    def sharing(self) -> Sharing | None:
        """How several ranks share the states."""
        return self.training.sharing

    @cached_property
    def ownership(self) -> Ownership | None:
        """How several ranks share Muon's matrices."""
        return self.training.ownership

    @cached_property
    def alone(self) -> Activations:
        """On one device."""
        return Activations.of(self.training, self._device)

    @cached_property
    def _together(self) -> Activations:
        """On several ranks, each of which may have a part of the model."""
        if self.sharing is not None and self.sharing.gathered_size == BYTES["bfloat16"]:
            return Activations.of(self.training, self._device, half_blocks=True)
        return self.alone

    @property
    def _device(self) -> Device:
        hardware = self.hardware
        return Device(hardware.accelerator, hardware.memory, self.training.compiled)

    def memory(self, micro_size: int, world_size: int) -> Memory:
        """Return peak memory of each of `world_size` ranks at `micro_size` samples at a time.

        All gradients are counted, as under DDP and from the second micro-step on.
        """
        accumulation = self._accumulation(micro_size, world_size)
        parts = self._without_activations(world_size, accumulation)
        activations = self._activations(world_size).at(micro_size)
        return replace(parts, activations=activations)

    def largest_micro_size(self, world_size: int) -> int:
        """Return the largest micro-batch that fits, in samples; 0 if not even one sample does."""
        rest = self._without_activations(world_size, accumulation=1).total
        return self._activations(world_size).largest(self.hardware.memory - rest)

    def _activations(self, world_size: int) -> Activations:
        return self._together if world_size > 1 else self.alone

    def _without_activations(self, world_size: int, accumulation: int) -> Memory:
        states = self.training.states
        gathered = copies = 0.0
        sums = states.gradients * gradient_copies(
            accumulation, is_exact=self.training.batch.is_exact
        )
        if self.sharing and world_size > 1:
            parts = self.training.tensor_parallel
            sums = states.gradients // parts * (self.sharing.adds_whole and accumulation > 1)
            gathered = self.sharing.gathered
            states = states.shared(world_size)
        elif world_size > 1:
            copies = states.gradients * has_bucket_copies(self.training.settings, accumulation)
            saved = self.ownership.saved(world_size) if self.ownership else 0
            states = replace(states, optimizer=states.optimizer - saved)
        return Memory(
            weights=states.weights,
            gradients=states.gradients,
            optimizer=states.optimizer,
            buckets=copies,
            gathered=gathered,
            sums=sums,
            activations=0,
            context=self.hardware.context,
        )

    def _accumulation(self, micro_size: int, world_size: int) -> int:
        batch = self.training.batch
        ranks = max(1, world_size // self.training.tensor_parallel)  # with samples of their own
        return 1 if batch.grows else batch.global_size // (micro_size * ranks)

    def remedies(self, batch: Batch) -> list[Remedy]:
        """Return what would fit in place of `batch`.

        These are single changes; only if none of them fits are they combinations of two.
        """
        others = {
            words: replace(self, training=other, others={})
            for words, other in self.others.items()
            if batch.world_size > 1 or other.strategy == self.training.strategy
        }
        found = [*_smaller("", self, batch)]
        for words, room in others.items():
            if " " not in words:
                found += _as_is(words, room, batch)
        if found:
            return found
        for words, room in others.items():
            if " " in words:
                found += _as_is(words, room, batch)
        for words, room in others.items():
            found += _smaller(words, room, batch)
        return found


def _as_is(words: str, room: Room, batch: Batch) -> Iterator[Remedy]:
    total = room.memory(batch.micro_size, batch.world_size).total
    if total <= room.hardware.memory:
        yield Remedy(words, total)


def _smaller(words: str, room: Room, batch: Batch) -> Iterator[Remedy]:
    """Yield the largest micro-batch that fits and divides a rank's samples per step."""
    most = min(room.largest_micro_size(batch.world_size), batch.micro_size - 1)
    samples = batch.micro_size * batch.accumulation
    sizes = [size for size in range(most, 0, -1) if batch.grows or samples % size == 0]
    name = "exact_micro_size" if batch.is_exact else "micro_size"
    for size in sizes:
        total = room.memory(size, batch.world_size).total
        if total <= room.hardware.memory and _adds_up(batch, size):
            yield Remedy(f"{words} batch.{name}={size}".strip(), total)
            return


def _adds_up(batch: Batch, size: int) -> bool:
    """Check whether a run can have micro-batches of this size on this number of devices."""
    total = None if batch.grows else batch.global_size
    try:
        changed = Batch(total, size, exact_micro_size=size if batch.is_exact else None)
        changed.spread_over(batch.devices, batch.nodes, batch.tensor_parallel)
    except UserError:
        return False
    return True
