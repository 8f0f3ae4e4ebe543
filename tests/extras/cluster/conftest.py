from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from omegaconf import DictConfig

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster import ledger, memory
from lockstep_gpt.launch import compose

# The command with mounts of its own, as `unshare --mount` would start it, without a new Python.
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
    """Start the command after a shell's line that mounts what it alone shall see."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can give a process mounts of its own")

    def start(mounts: str, *words: str, **environment: str) -> Any:
        (command.folder / "apart.py").write_text(APART)
        place = {"PYTHONPATH": str(command.folder), "MOUNTS": mounts}
        return command.start(*words, target="apart:main", **place, **environment)

    return start


def compose_words(*words: str) -> Config:
    """Return the configuration that words of the command line make."""
    made: list[Config] = []

    def job(config: DictConfig) -> None:
        made.append(compose.checked(config)[1])

    compose.run(list(words), job)
    return made[0]


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    """The bytes and ledgers of what has been traced."""
    return {}


@pytest.fixture
def traced_once(known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a shape for the first prediction that needs it: its bytes depend on nothing else."""
    for module, name in ((memory, "trace_peak"), (ledger, "trace")):
        monkeypatch.setattr(module, name, partial(_once, known, getattr(module, name)))


def _once(known: dict[str, Any], trace: Callable[..., Any], *given: Any) -> Any:
    words = [
        (each.precision, each.compile, each.optim) if isinstance(each, Config) else each
        for each in given
    ]
    key = f"{trace.__name__} {words}"
    if key not in known:
        known[key] = trace(*given)
    return known[key]


@pytest.fixture(scope="session")
def composed() -> Callable[..., Config]:
    return compose_words
