"""The Python whose processes are forks, which tests use instead of the real one."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux alone")


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
