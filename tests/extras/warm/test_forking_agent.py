"""Warm ranks behave like cold ones: the same bits, variables, and endings."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.warm import server
from lockstep_gpt.extras.warm.warm_settings import WarmSettings

TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp", "model.dropout=0.1")
TELLS = """
import json, os, lightning
class Tells(lightning.Callback):
    def on_train_start(self, trainer, module):
        with open(f"{os.environ['WARM']}-{os.environ['RANK']}.json", "w") as file:
            json.dump(dict(os.environ), file)
"""
OF_THIS_START = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "WARM")


@pytest.mark.slow
def test_warm_ranks_have_the_variables_and_the_bits_of_cold_ones(command):
    (command.folder / "tells.py").write_text(TELLS)
    words = (*TWO, "+callbacks.tells._target_=tells.Tells")
    for warm in ("true", "false"):
        environment = {"PYTHONPATH": str(command.folder), "WARM": warm}
        command.train(*words, f"warm.enabled={warm}", f"run_dir=run-{warm}", **environment)
    for rank in (0, 1):
        warm, cold = (
            json.loads((command.folder / f"{name}-{rank}.json").read_text())
            for name in ("true", "false")
        )
        assert warm.keys() == cold.keys()
        assert [name for name in cold if cold[name] != warm[name]] == sorted(
            set(OF_THIS_START) & set(cold), key=list(cold).index
        )
    warm, cold = (
        torch.load(command.folder / f"run-{name}/checkpoints/step=000020.ckpt")["state_dict"]
        for name in ("true", "false")
    )
    assert warm.keys() == cold.keys()
    assert all(torch.equal(warm[name], cold[name]) for name in cold)


def test_forks_that_must_be_but_cannot_are_rejected(monkeypatch):
    config = Config(max_steps=1, of_extras={"warm": WarmSettings(enabled=True)})
    server.refuse_impossible(config)
    monkeypatch.setattr(server.sys, "platform", "darwin")
    with pytest.raises(
        UserError, match=r"^warm.enabled=true needs Linux and its /proc; remove it, or set false"
    ):
        server.refuse_impossible(config)


@pytest.mark.slow
def test_jobs_of_a_sweep_are_forks_of_one_process(command):
    command.train(*TWO, "run_dir=first", "max_steps=6")
    before = {key: running.process.pid for key, running in server._servers.items()}
    command.train("--multirun", "seed=1,2", *TWO, "run_dir=sweep", "max_steps=6")
    assert {key: running.process.pid for key, running in server._servers.items()} == before
    command.train(*TWO, "run_dir=more", "max_steps=6", OMP_NUM_THREADS="2")
    assert len(server._servers) == len(before) + 1  # other thread settings: a separate server
    for key in {*server._servers} - {*before}:
        server._servers.pop(key).close()


def started(command, processes_of, wait_for, *words):
    """Start a long run; return it and a function that finds its processes by their arguments."""
    run = command.folder / "run"
    process = command.start(*command.smoke(*TWO, *words, f"run_dir={run}"))

    def find(word):
        return [pid for pid in processes_of(run) if word in words_of(pid)]

    saved = (run / "checkpoints").glob
    wait_for(lambda: any(saved("step=*.ckpt")) or process.poll() is not None)
    return process, find


def words_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.slow
def test_ranks_restart_cold_after_the_server_was_killed(command, processes_of, wait_for, kill):
    process, find = started(command, processes_of, wait_for, "max_steps=200", "checkpoint.every=10")
    kill(find("lockstep_gpt.extras.warm")[0])
    before = set(find("rank_program"))
    kill(max(before))
    wait_for(lambda: len(set(find("rank_program")) - before) == 2)
    assert all("python" in words_of(pid).split()[0] for pid in find("rank_program"))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "was killed by SIGKILL; restarting all ranks (1 of 3)" in errors


@pytest.mark.slow
def test_a_sigterm_at_any_moment_of_the_start_leaves_no_process(command, processes_of, wait_for):
    chance = random.Random(3)
    for attempt in range(3):
        run = command.folder / f"run{attempt}"
        words = command.smoke(*TWO, "max_steps=100000", f"run_dir={run}")
        process = command.start_words([sys.executable, "-m", "lockstep_gpt", *words])
        time.sleep(chance.uniform(0.5, 8))  # between its own imports and its first steps
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
        assert process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM)
        wait_for(lambda run=run: not processes_of(run), 60)
