"""The workers of pytest-xdist have a server from their start: see tests/forked_python.py."""

import os

import pytest

from lockstep_gpt.extras.warm import server as servers

pytestmark = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ, reason="no worker of pytest-xdist runs this"
)


def test_a_worker_needs_no_further_server_for_commands(command, monkeypatch):
    monkeypatch.setattr(servers.Server, "started", None)
    process = command.start("--help")
    assert "lockstep-gpt" in process.communicate(timeout=60)[0]
