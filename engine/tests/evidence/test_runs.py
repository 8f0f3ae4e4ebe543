"""A side has a name that a sentence can contain."""

from __future__ import annotations

import pytest

from lockstep.errors import UserError
from lockstep.evidence.runs import sides_of


def test_a_side_is_called_by_what_it_changes():
    sides = sides_of(["optim=adamw", "optim=muon optim.lr=0.01", "'data.path=my text'"])
    assert [side.name for side in sides] == ["adamw", "muon lr=0.01", "path=my text"]
    assert [side.folder for side in sides] == ["adamw", "muon-lr-0.01", "path-my-text"]
    assert sides[1].words == ("optim=muon", "optim.lr=0.01")
    same = sides_of(["optim.lr=1", "other.lr=1"])
    assert [side.name for side in same] == ["optim.lr=1", "other.lr=1"]
    assert sides_of(["", "a=b"])[0].name == "base"
    with pytest.raises(UserError, match=r"^--variant a='b: No closing quotation"):
        sides_of(["", "a='b"])
