"""What Lightning hears about this rank."""

import pytest

from lockstep.ranks.cluster_environment import RanksEnvironment
from lockstep.ranks.ranks import Ranks


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_lightning_hears_the_rank_from_us(monkeypatch, rank, node):
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "29500")
    environment = RanksEnvironment(Ranks(rank, rank % 4, world_size=8, local_world_size=4))
    environment.set_world_size(1)  # Lightning's own guesses change nothing
    environment.set_global_rank(0)
    assert (environment.global_rank(), environment.world_size()) == (rank, 8)
    assert (environment.local_rank(), environment.node_rank()) == (rank % 4, node)
    assert (environment.main_address, environment.main_port) == ("here", 29500)
    assert environment.creates_processes_externally
    assert not RanksEnvironment.detect()
