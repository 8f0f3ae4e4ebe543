"""The Python whose processes are forks, which tests use instead of the real one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux alone")
of_workers = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" not in os.environ, reason="no worker of pytest-xdist runs this"
)


def state_and_parent_of(pid):
    """Return a process's state, such as "Z", and the id of its parent, as the system tells them."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def test_a_requester_killed_during_or_after_a_fork_does_not_affect_others(python_of_forks):
    address = Path(python_of_forks).with_name("socket")
    environment = json.loads(address.with_name("socket.json").read_text())

    def answer():
        words = [python_of_forks, "-c", "import sys; print('torch' in sys.modules)"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert answer() == (0, "True\n")
    lasting = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    process = subprocess.Popen([python_of_forks, "-c", lasting], env=environment, stdout=PIPE)
    fork = int(process.stdout.readline())
    _, server = state_and_parent_of(fork)
    os.kill(server, signal.SIGSTOP)  # so that it sees both ends at once
    os.kill(fork, signal.SIGKILL)
    while state_and_parent_of(fork)[0] != "Z":
        time.sleep(0.01)
    process.kill()
    process.communicate()
    os.kill(server, signal.SIGCONT)
    assert answer() == (0, "True\n")
    for sent in (b"", (900).to_bytes(8), (900).to_bytes(8) + b'{"words'):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(address))
            client.sendall(sent)
    assert answer() == (0, "True\n")


@of_workers
def test_a_worker_is_a_fork_that_starts_the_real_python():
    _, parent = state_and_parent_of(os.getpid())
    line = Path(f"/proc/{parent}/cmdline").read_text().replace("\0", " ")
    assert "forked_python.py serve" in line
    assert os.getppid() != parent  # it tells its starter's id
    words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "False\n"
