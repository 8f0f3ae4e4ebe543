"""The Python whose processes are forks, which tests use instead of the real one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux alone")
of_workers = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ, reason="no worker of pytest-xdist runs this"
)


def test_a_requester_killed_during_a_fork_does_not_affect_others(python_of_forks):
    address = Path(python_of_forks).with_name("socket")
    environment = json.loads(address.with_name("socket.json").read_text())

    def answer():
        words = [python_of_forks, "-c", "import sys; print('torch' in sys.modules)"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert answer() == (0, "True\n")
    for sent in (b"", (900).to_bytes(8), (900).to_bytes(8) + b'{"words'):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
            client.sendall(sent)
    assert answer() == (0, "True\n")


@of_workers
def test_a_worker_is_a_fork_that_starts_the_real_python():
    parent = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1]
    line = Path("/proc", parent, "cmdline").read_text().replace("\0", " ")
    assert "forked_python.py serve" in line
    assert os.getppid() != int(parent)  # it tells its starter's id
    words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
