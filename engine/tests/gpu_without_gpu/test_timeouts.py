"""All groups of ranks wait for one another as long as `strategy.timeout_seconds` says."""

import os

import pytest
import torch
from lightning import Callback

from lockstep.callbacks.guards import stall_limit
from lockstep.callbacks.stopping import GracefulStop
from lockstep.launch import rank as of_launch
from lockstep.ranks.ranks import Ranks, gloo_group
from lockstep.run.directory import RunDirectory
from lockstep.strategies import placing as strategies

SECONDS = 77  # torch's defaults are 600 and 1800; the ranks of these tests joined with 30
FSDP2 = {
    "process_group_backend": None,
    "timeout_seconds": SECONDS,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "save_parts": False,
}


def wait_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


class Waits(Callback):
    """Keeps the longest wait of the groups that a training rank has."""

    def __init__(self, stop):
        self.stop, self.found = stop, {}

    def on_train_end(self, trainer, pl_module):
        mesh = trainer.strategy.device_mesh
        self.found = {name: wait_of(mesh[name].get_group()) for name in mesh.mesh_dim_names}
        self.found["vote"] = wait_of(self.stop.vote._group)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_mesh_and_the_vote_wait_as_long_as_is_set(
    on_ranks, new_run, rank_environment, tmp_path, tensor_parallel
):
    def rank(number):
        os.environ.update(rank_environment(number, 2))
        run = new_run(max_steps=1)
        checkpoints = run.checkpoints(tmp_path)
        stop = GracefulStop(checkpoints)
        waits = Waits(stop)
        strategy = strategies.fsdp2(**FSDP2, tensor_parallel=tensor_parallel)
        run.fit(waits, stop, checkpoints, strategy=strategy, devices=2)
        return waits.found

    names = ("data_parallel", "tensor_parallel", "vote")
    assert on_ranks(2, rank) == [dict.fromkeys(names, SECONDS)] * 2


def test_a_group_of_some_ranks_waits_as_long_as_it_is_told(on_ranks):
    def rank(number):
        some, every = gloo_group(SECONDS, [0, 2]), gloo_group(5)
        return [wait_of(group) for group in ([some, every] if number != 1 else [every])]

    assert on_ranks(3, rank) == [[SECONDS, 5], [5], [SECONDS, 5]]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("seconds", [20, 600, 1800, 7200])
def test_the_guard_of_a_stall_ends_a_run_before_any_group_of_nccl_does(tmp_path, backend, seconds):
    directory = RunDirectory(tmp_path)
    directory.create({"strategy": {"timeout_seconds": seconds, "process_group_backend": backend}})
    run = of_launch._run_of(directory, directory.resolved(), Ranks())
    assert run.timeout == seconds
    if backend == "nccl":
        assert stall_limit(1e9, backend, run.timeout) < run.timeout
