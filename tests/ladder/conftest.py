"""What the ladder's tests share: its scripts, run for real, on the data of all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LADDER = Path(__file__).parents[2] / "scripts" / "ladder"
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "PYTEST_", "OMP_NUM_THREADS")


@pytest.fixture(scope="session")
def ladder() -> Path:
    return LADDER


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python WORDS`, on one thread, and check its exit status."""

    def run(
        *words: str | Path, status: int = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env={**kept, "OMP_NUM_THREADS": "1"},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import the ladder's modules as its scripts do."""
    monkeypatch.syspath_prepend(LADDER)


@pytest.fixture(scope="session")
def words(data_root: Path) -> list[str]:
    """Settings under which a rung begins at once: there is next to no data to prepare."""
    data = ["data=synthetic", "data.vocab_size=64", "data.tokens=200000"]
    return [*data, f"data.root={data_root}", "trainer=cpu"]
