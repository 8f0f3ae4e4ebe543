"""One finished comparison of short runs, for all tests that only read it."""

from __future__ import annotations

import json

import pytest

SHORT = ("trainer=cpu", "max_steps=8", "val_every=8", "log_every=4", "checkpoint.every=8")
VARIANT = ("--variant", "optim.lr=4e-3")


@pytest.fixture(scope="session")
def words_of():
    """Return the words of a comparison of short runs of the smoke experiment."""

    def make(command, *more, logger="none"):
        settings = command.smoke(f"logger={logger}", *SHORT)[1:]
        return ["compare", "--folder", "pairs", *more, *settings]

    return make


@pytest.fixture(scope="session")
def compared(finished, words_of, tmp_path_factory):
    """A comparison in `pairs`: the command in its folder, and what it printed."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("compared"))
    done = command(*words_of(command, *VARIANT))
    return command, done.stdout


@pytest.fixture
def losses_in():
    """Return the validation losses of a comparison's runs, by side and seed."""

    def read(folder):
        paths = folder.glob("*/*/summary.json")
        return {
            str(path.parent.relative_to(folder)): json.loads(path.read_text())["val_loss"]
            for path in paths
        }

    return read
