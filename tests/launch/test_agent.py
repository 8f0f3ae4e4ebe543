import signal
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.metrics import api
from torch.distributed.elastic.multiprocessing import SignalException

from lockstep_gpt.exits import Ending
from lockstep_gpt.launch.agent import RankAgent, describe_endings
from lockstep_gpt.launch.first_signal import FirstSignal


def test_of_ranks_that_ended_the_culprits_are_named():
    lost, killed, other = Ending(75), Ending(-9), Ending(255)
    assert describe_endings({0: lost, 1: killed}) == "rank 1 was killed by SIGKILL"
    assert describe_endings({0: lost, 1: other}) == "rank 1 ended with status 255"
    assert describe_endings({0: lost, 1: Ending(0)}) == "rank 1 ended with status 0"
    assert describe_endings({0: lost, 1: lost}) == "rank 0 lost its peers, rank 1 lost its peers"


def test_a_signal_during_torch_s_timing_is_kept(monkeypatch):
    def stop():
        raise SignalException("stop", signal.SIGTERM)

    agent = RankAgent.__new__(RankAgent)
    agent._failed_ranks = lambda _: {}
    agent._first_signal = FirstSignal()
    monkeypatch.setattr(api, "time", SimpleNamespace(time=stop))
    with pytest.raises(SignalException) as caught:
        agent._monitor_workers(None)
    assert caught.value.sigval == signal.SIGTERM
