"""Ranks that one process spawns: the same losses as an agent's, and how they end."""

import pytest

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.launch.devices import place


def test_spawned_ranks_give_the_same_losses(two):
    command, _ = two
    command.train("trainer=cpu", "trainer.devices=2", "strategy=ddp_spawn", "run_dir=runs/spawned")
    assert command.summary("runs/spawned")["val_loss"] == command.summary("runs/two")["val_loss"]


def test_spawning_inside_a_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    config = Config(max_steps=1, trainer={"accelerator": "cpu"}, strategy={"start_method": "spawn"})
    line = r"^strategy=ddp_spawn starts its own ranks and cannot run inside"
    with pytest.raises(UserError, match=line):
        place(config)


def test_a_command_that_spawns_inside_a_launcher_is_refused(command):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = command.train("trainer=cpu", "strategy=ddp_spawn", status=2, **environment)
    assert "cannot run inside a launcher" in result.stderr
