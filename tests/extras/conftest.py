"""The command with mounts of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

# The command with its own mounts, as `unshare --mount` would start it, without a new Python.
APART = """
import ctypes, os, subprocess
from lockstep_gpt import cli
def main(words):
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    for line in ("mount --make-rprivate /", os.environ["MOUNTS"]):
        subprocess.run(line, shell=True, check=True)
    return cli.main(words)
"""


@pytest.fixture
def apart(command: Any) -> Callable[..., Any]:
    """Start the command after a shell line with mounts that only it sees."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can give a process mounts of its own")

    def start(mounts: str, *words: str, **environment: str) -> Any:
        (command.folder / "apart.py").write_text(APART)
        place = {"PYTHONPATH": str(command.folder), "MOUNTS": mounts}
        return command.start(*words, target="apart:main", **place, **environment)

    return start


@pytest.fixture
def with_shared_memory(command, apart):
    """Train with a separate /dev/shm; return the status and the output."""

    def train(mount, *words):
        words = command.smoke("run_dir=run", *words)
        process = apart(f"mount -t tmpfs -o {mount} tmpfs /dev/shm", *words)
        _, said = process.communicate(timeout=240)
        return process.returncode, said

    return train
