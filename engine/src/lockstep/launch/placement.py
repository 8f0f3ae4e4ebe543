"""Where the ranks of a run are, and how they start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from lockstep.launch.launch_settings import LaunchSettings
from lockstep.settings import node_of


@dataclass(frozen=True)
class Placement:
    """The ranks of a run: `devices` on each of `nodes` machines, one rank per device."""

    accelerator: str  # cpu, cuda, or mps
    devices: int
    nodes: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return where a frozen configuration, in which devices are decided, puts the ranks."""
        trainer = node_of(values, "trainer")
        return cls(
            trainer.get("accelerator", "cpu"),
            trainer.get("devices", 1),
            trainer.get("num_nodes", 1),
        )

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.devices * self.nodes


@dataclass(frozen=True)
class Launch:
    """All that starts, watches, and restarts ranks needs to know of a run."""

    placement: Placement
    settings: LaunchSettings
    is_verbose: bool = False  # show what torch's agent logs

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return what a frozen configuration says, in which devices are decided."""
        return cls(
            Placement.of(values),
            LaunchSettings.of(values),
            is_verbose=values.get("verbosity") == "debug",
        )

    @property
    def devices(self) -> int:
        """Ranks on each machine."""
        return self.placement.devices

    @property
    def nodes(self) -> int:
        """Machines."""
        return self.placement.nodes
