"""What tests of trackers share."""

import sys

import pytest


@pytest.fixture
def fresh_trackio(monkeypatch):
    """Let trackio be imported again, because it reads its folder only then; undo it afterward."""

    def imported():
        return [name for name in sys.modules if name.split(".")[0] == "trackio"]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in imported():
        del sys.modules[name]
