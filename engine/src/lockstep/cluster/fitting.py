"""Check whether a run fits in its devices' memory, and find settings with which it would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lockstep.batch import Batch, gradient_copies
from lockstep.cluster import memory
from lockstep.cluster.choices import (
    can_shard,
    tensor_parallel,
    with_node,
    with_values,
)
from lockstep.cluster.hardware import Hardware
from lockstep.cluster.memory import Footprint, Memory
from lockstep.cluster.sharing import SIZES, Ownership, Sharing
from lockstep.cluster.tracing import LanguageModel
from lockstep.errors import UserError
from lockstep.strategies.ddp import has_bucket_copies

CHECKPOINTING = "model.activation_checkpointing=true"
SHARDING = "strategy=fsdp2"
CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Remedy:
    """Settings with which a run fits."""

    words: str
    memory: float  # bytes on one device


@dataclass(frozen=True)
class Room:
    """The memory that a run needs on each device, for any number of devices."""

    config: DictConfig
    hardware: Hardware
    model: LanguageModel
    sharing: Sharing | None
    alone: Footprint
    together: Footprint  # on several ranks, before sharding
    ownership: Ownership | None  # of Muon's matrices, on several ranks

    @classmethod
    def of(cls, config: DictConfig, hardware: Hardware, vocab_size: int) -> Room:
        """Compute the memory that `config` needs."""
        model = memory.whole_model(config, vocab_size)
        sharing = Sharing.of(config, model)
        kind = hardware.accelerator
        alone = together = memory.footprint(config, model, kind, memory=hardware.memory)
        half_blocks = sharing is not None and sharing.gathered_size == SIZES["bfloat16"]
        if half_blocks:
            together = memory.footprint(config, model, kind, half_blocks, hardware.memory)
        ownership = Ownership.of(config, model)
        return cls(config, hardware, model, sharing, alone, together, ownership)

    def memory(self, micro_size: int, world_size: int) -> Memory:
        """Return peak memory of each of `world_size` ranks at `micro_size` samples at a time."""
        copies = self._copies(world_size, self._accumulation(micro_size, world_size))
        peak = self._footprint(world_size).memory(micro_size, self.hardware.context, copies)
        return replace(peak, copies=peak.copies + self._sums(micro_size, world_size))

    def largest_micro_size(self, world_size: int) -> int:
        """Return the largest micro-batch that fits, in samples; 0 if not even one sample does."""
        return self._footprint(world_size).largest_micro_size(
            self.hardware.memory, self.hardware.context, self._copies(world_size, accumulation=1)
        )

    def remedies(self, batch: Batch) -> list[Remedy]:
        """Return what would fit in place of `batch`.

        These are single changes; only if none of them fits are they combinations of two.
        """
        others = [(words, other) for words, other in self._others if self._serves(other, batch)]
        single = [*_smaller("", self, batch)]
        for words, room in others[:2]:
            single += _as_is(words, room, batch)
        if single:
            return single
        pairs: list[Remedy] = []
        for words, room in others[2:]:
            pairs += _as_is(words, room, batch)
        for words, room in others:
            pairs += _smaller(words, room, batch)
        return pairs

    def _serves(self, other: Room, batch: Batch) -> bool:
        return batch.world_size > 1 or not other.sharing or bool(self.sharing)

    @cached_property
    def _others(self) -> list[tuple[str, Room]]:
        """The same run with activation checkpointing, with sharding, and with both."""
        config = self.config
        changed: list[tuple[str, DictConfig]] = []
        if config.model.get("activation_checkpointing") is False:
            changed.append((CHECKPOINTING, _recomputing(config)))
        if not self.sharing and can_shard(config):
            changed.append((SHARDING, _sharded(config)))
        if len(changed) == 2:
            changed.append((f"{SHARDING} {CHECKPOINTING}", _recomputing(_sharded(config))))
        return [
            (words, Room.of(other, self.hardware, self.model.vocab_size))
            for words, other in changed
        ]

    def _footprint(self, world_size: int) -> Footprint:
        if self.sharing and world_size > 1:
            return self.together.shared(self.sharing, world_size)
        if self.ownership and world_size > 1:
            states = self.alone.states
            optimizer = states.optimizer - self.ownership.saved(world_size)
            return replace(self.alone, states=replace(states, optimizer=optimizer))
        return self.alone

    def _sums(self, micro_size: int, world_size: int) -> int:
        """Return the bytes, in addition to the gradients, that accumulation needs on a rank."""
        accumulation = self._accumulation(micro_size, world_size)
        if self.sharing and world_size > 1:
            part = self.together.states.gradients // tensor_parallel(self.config)
            return part * (self.sharing.adds_whole and accumulation > 1)
        is_exact = self.config.batch.get("exact_micro_size") is not None
        copies = gradient_copies(accumulation, is_exact=is_exact)
        return copies * self.alone.states.gradients

    def _accumulation(self, micro_size: int, world_size: int) -> int:
        samples = micro_size * self._data_parallel(world_size)
        return (self.config.batch.global_size or 0) // samples

    def _data_parallel(self, world_size: int) -> int:
        """Return how many ranks, or groups that split the model, have samples of their own."""
        return max(1, world_size // tensor_parallel(self.config))

    def _copies(self, world_size: int, accumulation: int) -> bool:
        """Return whether DDP keeps a copy of the gradients."""
        is_ddp = world_size > 1 and not self.sharing
        settings = {str(name): value for name, value in self.config.strategy.items()}
        return is_ddp and has_bucket_copies(settings, accumulation)


def _recomputing(config: DictConfig) -> DictConfig:
    return with_node(config, "model", with_values(config.model, activation_checkpointing=True))


def _sharded(config: DictConfig) -> DictConfig:
    return with_node(config, "strategy", OmegaConf.load(CONFIGS / "strategy/fsdp2.yaml"))


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
