"""Where the ranks of a run are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True)
class Placement:
    """The ranks of a run: `devices` on each of `nodes` machines, one rank per device."""

    accelerator: str  # cpu, cuda, or mps
    devices: int
    nodes: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return where a frozen configuration, in which devices are decided, puts the ranks."""
        trainer = values.get("trainer") or {}
        return cls(
            trainer.get("accelerator", "cpu"),
            trainer.get("devices", 1),
            trainer.get("num_nodes", 1),
        )

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.devices * self.nodes
