"""The backend that ranks ask for on GPUs, however they start."""

import json

import pytest
import torch
import torch.distributed as dist

from lockstep.launch import devices, launcher, rank_program, supervise
from lockstep.ranks import ranks
from lockstep.run.directory import RunDirectory

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **PLACE}
LAUNCHERS = {
    "torchrun": {**RANK, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    "srun": {**RANK, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
}


@pytest.fixture
def two_gpus(monkeypatch):
    """Pretend that there are two GPUs; return the backends that ranks ask for."""
    backends = []

    def connect(backend, **_settings):
        backends.append(backend)
        raise dist.DistBackendError("NCCL error in: here, invalid usage")

    monkeypatch.setattr(devices, "gpu_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(ranks, "choose_interfaces", lambda *_: None)
    monkeypatch.setattr(ranks, "meet", lambda *_: None)
    return backends


@pytest.mark.parametrize("accelerator", ["auto", "gpu"])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_s_ranks_ask_for_nccl(command, monkeypatch, two_gpus, name, accelerator):
    store = dist.HashStore()
    store.set("differences of rank 1", "")
    ended = []
    monkeypatch.setattr(launcher, "meet", lambda _: store)
    monkeypatch.setattr(launcher, "end_with_launcher", lambda: None)
    monkeypatch.setattr("lockstep.launch.start.end_process", ended.append)
    words = (f"trainer={accelerator}", "precision=32-true", "run_dir=run")
    command(*command.smoke(*words), status=1, **LAUNCHERS[name])
    assert two_gpus == ["nccl"]
    assert json.loads(store.get("offer"))["values"]["trainer"]["accelerator"] == "cuda"


def test_an_agent_s_ranks_ask_for_nccl(command, monkeypatch, two_gpus):
    def be_rank_zero(run, function, _node_rank):
        for variable, value in RANK.items():
            monkeypatch.setenv(variable, value)
        return Ended(rank_program.run_rank(run, function))

    class Ended:
        def __init__(self, status):
            self.status = status

        def wait(self):
            return self.status

    monkeypatch.setattr(supervise, "_start_agent", be_rank_zero)
    words = ("trainer=auto", "precision=32-true", "run_dir=run", "launch.max_restarts=0")
    command(*command.smoke(*words), status=1)
    assert two_gpus == ["nccl"]
    assert RunDirectory(command.folder / "run").values()["trainer"]["accelerator"] == "cuda"
