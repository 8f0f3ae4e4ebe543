import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import api
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep.launch.agent import RankAgent
from lockstep.launch.first_signal import FirstSignal
from lockstep.launch.shared_stop import SharedStop


def test_a_signal_during_torch_s_timing_is_kept(monkeypatch):
    def stop():
        raise SignalException("stop", signal.SIGTERM)

    agent = watching_agent([])
    monkeypatch.setattr(api, "time", SimpleNamespace(time=stop))
    with pytest.raises(SignalException) as caught:
        agent._monitor_workers(None)
    assert caught.value.sigval == signal.SIGTERM


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system can't tell of an end")
def test_an_agent_does_not_sleep_while_a_rank_ends(monkeypatch):
    rank = subprocess.Popen(["sleep", "0.2"])
    monkeypatch.setattr("lockstep.launch.agent.MONITOR_SECONDS", 3600)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda *_: rank.poll())
    assert watching_agent([rank.pid])._monitor_workers(None) == 0


def watching_agent(live_ranks):
    """Return an agent of these ranks, none of which has failed."""
    agent = RankAgent.__new__(RankAgent)
    agent._failed_ranks = lambda _: {}
    agent._first_signal = FirstSignal()
    alone = SimpleNamespace(group_world_size=1)
    agent._shared_stop = SharedStop(
        alone, None, agent._first_signal, stops_all=True, has_store=True
    )
    agent.live_ranks = lambda: live_ranks
    return agent
