"""Tells Lightning which rank this process is, however it was started."""

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

from lockstep.ranks.ranks import Ranks


class RanksEnvironment(ClusterEnvironment):
    """Lightning would look for a launcher by itself: it rejects `srun --ntasks`, for example."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no ranks."""
        return True

    @property
    def main_address(self) -> str:
        """The address of rank 0."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """The port at which ranks meet."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Return False: it is passed to the Trainer, not looked for."""
        return False

    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self._ranks.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number is known."""

    def global_rank(self) -> int:
        """Return the number of this rank among all."""
        return self._ranks.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is known."""

    def local_rank(self) -> int:
        """Return the number of this rank on its machine."""
        return self._ranks.local_rank

    def node_rank(self) -> int:
        """Return the number of this machine."""
        return self._ranks.rank // self._ranks.local_world_size
