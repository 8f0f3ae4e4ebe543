"""A whole run by command: it trains, goes on, and does what it suggests at its end."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from lockstep.commands import main

from lockstep_gpt import CONFIGS

SMALL = ["trainer=cpu", "trainer.devices=1", "logger=none", "run_dir=run"]


@pytest.mark.filterwarnings("ignore")  # of libraries, in commands that run in this process
def test_a_run_from_its_start_to_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # not in your home
    smoke = ["experiment=smoke"] if (CONFIGS / "experiment/smoke.yaml").exists() else []
    words = ["train", *smoke, *SMALL, "max_steps=4", "val_every=2"]
    command = [sys.executable, "-m", "lockstep_gpt", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (first,) = Path("run/checkpoints").glob("*.ckpt")
    assert first.name == "step=000004.ckpt"
    again = ["train", "run_dir=run", "resume=auto", "max_steps=6", "launch.inline=true"]
    assert main(again) == 0
    assert json.loads(Path("run/summary.json").read_text())["status"] == "done"
    assert Path("run/checkpoints/step=000006.ckpt").exists()
    suggested = capsys.readouterr().out.partition("\nnext\n")[2].strip().splitlines()
    assert suggested
    for line in suggested:
        *_, name, run = shlex.split(line)
        assert main([name, run]) == 0
