"""How ranks start: what nothing here can start is rejected."""

from pathlib import Path

import pytest

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.launch import start
from lockstep_gpt.run.directory import RunDirectory


def test_a_launcher_without_its_extra_is_rejected_in_one_line(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "additions", lambda _: [])
    run, config, unasked = RunDirectory(Path("none")), Config(max_steps=1), None
    with pytest.raises(UserError, match=r"^torchrun or another .* needs the extra launchers, "):
        start.begin(run, {}, config, unasked, unasked, unasked)
