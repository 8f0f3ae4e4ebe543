"""The runs in miniature of tests/training and tests/inference, for extras too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def _fixtures(folder: str) -> dict[str, object]:
    path = Path(__file__).parents[1] / folder / "conftest.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


_TRAINING = _fixtures("training")
folder, new_run, on_ranks = (_TRAINING[name] for name in ("folder", "new_run", "on_ranks"))
records, read_offline = (_TRAINING[name] for name in ("records", "read_offline"))
saved_run = _fixtures("inference")["saved_run"]


@pytest.fixture
def with_shared_memory(command, apart):
    """Train with loader processes and a /dev/shm of its own; return the status and what is said."""

    def train(mount, *words):
        words = command.smoke("data.num_workers=2", "run_dir=run", *words)
        process = apart(f"mount -t tmpfs -o {mount} tmpfs /dev/shm", *words)
        _, said = process.communicate(timeout=240)
        return process.returncode, said

    return train
