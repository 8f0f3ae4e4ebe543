"""The command, which waits for its agent: after a stop signal, not forever."""

import os
import signal
import subprocess
import threading
import time

import pytest

from lockstep import stop_signals
from lockstep.exits import after_signal
from lockstep.launch import supervise
from lockstep.run.directory import RunDirectory

VALUES = {
    "trainer": {"num_nodes": 1, "devices": 1, "accelerator": "cpu"},
    "launch": {"grace_seconds": 0.1},
}


@pytest.fixture
def stopped_agent(monkeypatch):
    """A process in the place of the agent, which SIGSTOP keeps from handling any other signal."""
    agent = subprocess.Popen(["sleep", "60"])
    os.kill(agent.pid, signal.SIGSTOP)
    monkeypatch.setattr(supervise, "_start_agent", lambda *_: agent)
    yield agent
    agent.kill()
    agent.wait()


def test_an_agent_that_does_not_end_after_a_signal_is_killed(stopped_agent, tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "AGENT_SECONDS", 0.1, raising=False)
    run = RunDirectory(tmp_path / "run")
    run.create(VALUES)
    rescue = threading.Timer(20, stopped_agent.kill)
    began = time.monotonic()
    rescue.start()
    with stop_signals.restored():
        stop_signals.install()
        signal.raise_signal(signal.SIGTERM)
        status = supervise.supervise(run, "a:b")
    rescue.cancel()
    assert status == after_signal(signal.SIGTERM)
    assert time.monotonic() - began < 15
