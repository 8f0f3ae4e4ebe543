"""Shared by the ladder's tests: its scripts, run for real, each command once."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LADDER = ROOT / "lab/ladder"
LAUNCHERS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "PYTEST_", "OMP_NUM_THREADS")
# Parallel runs give the same losses, and finish sooner. A wrong rung differs within a few steps.
MORE = {"compare.py": ["--at-once=3", "max_steps=20", "val_every=20"]}
NO_SETTINGS = ("mini_allreduce.py", "collectives.py", "sums.py")


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


@pytest.fixture(scope="session")
def ladder() -> Path:
    return LADDER


@pytest.fixture(scope="session")
def start(data_root: Path, python_of_forks: str) -> Callable[..., subprocess.Popen[str]]:
    """Start a command as the README writes it, in a folder that looks like the repository's."""

    def begin(line: str, folder: Path) -> subprocess.Popen[str]:
        *variables, python, script = shlex.split(line)[: line.split().index("python") + 2]
        assert python == "python", line
        words = shlex.split(line)[len(variables) + 2 :]
        data = [] if script.endswith(NO_SETTINGS) else [f"data.root={data_root}"]
        return subprocess.Popen(
            [python_of_forks, str(ROOT / script), *words, *MORE.get(Path(script).name, []), *data],
            cwd=folder,
            env=environment(**dict(each.split("=", 1) for each in variables)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.fixture(scope="session")
def shown(start: Callable[..., subprocess.Popen[str]], shared: Path) -> Callable[[str], str]:
    """Run one of the README's commands in one worker of pytest-xdist; return its output."""
    folder = shared / "ladder"
    folder.mkdir(exist_ok=True)

    def run(line: str) -> str:
        screen = folder / f"{shlex.quote(line).replace('/', '-')}.screen"
        with screen.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not screen.exists():
                process = start(line, folder)
                out, err = process.communicate(timeout=540)
                assert process.returncode == 0, f"{line}\n{out}\n{err}"
                screen.write_text(out)
        return screen.read_text()

    return run


@pytest.fixture(scope="session")
def python(python_of_forks: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python WORDS` on one thread and check its exit status."""

    def run(*words: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [python_of_forks, *map(str, words)],
            env=environment(),
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
def words(data_root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings with which a rung starts at once: there is almost no data to prepare."""
    (path := tmp_path_factory.mktemp("corpus") / "text").write_text("some words " * 18_000)
    return ["data=text", f"data.source.path={path}", f"data.root={data_root}", "trainer=cpu"]
