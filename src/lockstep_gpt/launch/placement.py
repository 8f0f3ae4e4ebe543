"""Where the ranks of a run are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The ranks of a run: `devices` on each of `nodes` machines, one rank per device."""

    accelerator: str  # cpu, cuda, or mps
    devices: int
    nodes: int

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.devices * self.nodes
