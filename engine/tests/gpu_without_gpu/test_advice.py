"""What a rank does before it trains: its GPU, its connection, its settings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lockstep.exits import Exit
from lockstep.launch import rank
from lockstep.launch.hydra_job import HYDRA_FILE
from lockstep.ranks import ranks
from lockstep.run import run
from lockstep.run.directory import RunDirectory


def test_a_rank_selects_its_gpu_and_connects_first(monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(("set", device)))

    def connect(backend, **settings):
        done.append((backend, settings["device_id"]))
        raise dist.DistBackendError("NCCL error in: here, invalid usage")

    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(ranks, "choose_interfaces", lambda *_: None)
    monkeypatch.setattr(ranks, "meet", lambda *_: None)
    here = ranks.Ranks(rank=5, local_rank=1, world_size=8, local_world_size=4)
    with pytest.raises(dist.DistBackendError):
        ranks.join(here, accelerator="cuda")
    assert done == [("set", torch.device("cuda", 1)), ("nccl", torch.device("cuda", 1))]


def test_joining_is_the_first_that_a_rank_does_within_its_own_error_handling(monkeypatch, tmp_path):
    def join(*_, **_settings):
        raise dist.DistBackendError("NCCL error in: here, invalid usage")

    monkeypatch.setattr(run, "join", join)
    directory, called = RunDirectory(tmp_path), []
    directory.create({"trainer": {"accelerator": "cpu"}})
    (tmp_path / HYDRA_FILE).parent.mkdir()
    (tmp_path / HYDRA_FILE).write_text("hydra: {job_logging: {root: null}}")
    assert rank.call(called.append, directory) != Exit.DONE
    assert directory.read_failure()["error"].startswith("DistBackendError: NCCL error in: here")
    assert not called


def test_the_setting_for_equal_bits_on_gpus_is_accepted(command):
    command.train("+trainer.deterministic=true", "run_dir=run")
    assert command.summary("run")["status"] == "done"
