"""Ranks that resume read one run directory, and its checkpoint once."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints import sums as checkpoint_sums
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import (
    checkpoint_path,
    find_verified,
    read_verified,
    write_checkpoint,
)
from lockstep.checkpoints.sums import sum_path, verify
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.run.resuming import (
    refuse_lost_numbers,
    refuse_other_directory,
    state_to_resume,
    verified_on_each_machine,
)
from lockstep.strategies import placing as strategies
from lockstep.strategies.exact_sums import SingleDeviceStrategy
from lockstep.strategies.restored_states import copy_restored_state

DDP = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}
MIB = 2**20


def test_a_folder_that_only_looks_shared_is_named(on_ranks, tmp_path):
    runs = [RunDirectory(tmp_path / f"machine{number}") for number in range(2)]
    for number, run in enumerate(runs):  # before any rank reads them
        run.path.mkdir()
        run.config.write_text(f"seed: {number}\n")

    def compare(rank):
        run = runs[rank // 2]
        try:
            return refuse_other_directory(run)
        except UserError as error:
            return str(error)

    assert on_ranks(2, compare) == [None, None]
    rule = "of rank 2, 3 is not rank 0's folder; name one that all nodes share"
    first, *_, last = on_ranks(4, compare)
    assert (first, last) == tuple(f"run_dir={tmp_path}/machine{n} {rule}" for n in (0, 1))


@pytest.fixture
def hashed(monkeypatch):
    """The names of files whose SHA-256 was computed."""
    names = []
    compute = checkpoint_sums.sha256_of

    def compute_and_note(path):
        names.append(path.name)
        return compute(path)

    monkeypatch.setattr(checkpoint_sums, "sha256_of", compute_and_note)
    return names


def join_machine(rank, ranks_per_machine):
    """Give this process the environment of a rank on one of several machines."""
    machine, local_rank = divmod(rank, ranks_per_machine)
    numbers = {
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": ranks_per_machine,
        "GROUP_RANK": machine,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "kit",
    }
    os.environ.update({name: str(value) for name, value in numbers.items()})


@pytest.mark.parametrize("machines", [1, 2])
def test_each_machine_hashes_a_checkpoint_once(new_run, on_ranks, tmp_path, hashed, machines):
    directory = RunDirectory(tmp_path / "run")
    first = new_run(max_steps=3)
    first.fit(first.checkpoints(directory.checkpoints))
    (path,) = directory.checkpoints.glob("*.ckpt")
    per_machine = 4 // machines

    def resume(rank):
        join_machine(rank, per_machine)
        hashed.clear()
        run = new_run(max_steps=4)
        io = AtomicCheckpointIO(directory)
        io.verified = state_to_resume(directory)
        places = {"strategy": strategies.ddp(**DDP), "devices": per_machine, "num_nodes": machines}
        checkpoints = run.checkpoints(directory.checkpoints)
        trainer = run.fit(checkpoints, io=io, ckpt_path=str(io.verified.path), **places)
        return hashed, trainer.global_step

    done = on_ranks(4, resume)
    assert done == [([path.name] if rank % per_machine == 0 else [], 4) for rank in range(4)]


@pytest.mark.parametrize("name", ["", "checkpoints/step=000001.ckpt"])
def test_a_named_run_or_checkpoint_is_hashed_once(tmp_path, hashed, name):
    path = saved(checkpoint_path(tmp_path / "checkpoints", 1), w=torch.zeros(3))
    read_verified(find_verified(tmp_path / name))
    assert hashed == [path.name]


def saved(path, **tensors):
    content = {"config": {}, "tokenizer": {}, "state_dict": tensors}
    write_checkpoint(content, path)
    return path


@pytest.fixture
def on_machines(tmp_path, on_ranks):
    """Let two machines of two ranks each, with folders of their own, share a checkpoint.

    Returns what each rank may load, or its error. Both machines give it the same path.
    """

    def share(*numbers):
        for machine, number in enumerate(numbers):
            saved(checkpoint_path(tmp_path / f"machine{machine}", 1), w=torch.full((3,), number))

        def verified(rank):
            join_machine(rank, 2)
            os.chdir(tmp_path / f"machine{rank // 2}")
            path = checkpoint_path(Path(), 1)
            checkpoint = verify(path) if rank == 0 else None
            return read_verified(verified_on_each_machine(checkpoint))["state_dict"]["w"].tolist()

        return on_ranks(4, verified)

    return share


def test_machines_with_copies_of_their_own_verify_their_own(on_machines):
    assert on_machines(1.0, 1.0) == [[1.0] * 3] * 4


def test_a_machine_with_another_checkpoint_is_refused(on_machines):
    _, _, refused, _ = on_machines(1.0, 2.0)
    rule = "checkpoint step=000001.ckpt of rank 2 is not rank 0's; name a folder that all nodes"
    assert rule in refused


def test_a_replaced_checkpoint_is_refused_after_it_was_verified(tmp_path):
    path = saved(checkpoint_path(tmp_path, 1), w=torch.zeros(3))
    verified = verify(path)
    assert torch.equal(read_verified(verified)["state_dict"]["w"], torch.zeros(3))
    times = path.stat()
    saved(path, w=torch.ones(3))  # intact, of the same size, and next of the same age
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for change in (lambda: None, path.unlink):
        change()
        with pytest.raises(UserError, match="are not those that were verified a moment ago"):
            read_verified(verified)
    assert sum_path(path).exists()


class Unread(dict):
    """Weights of which a rank must not read any."""

    def __getitem__(self, name):
        raise AssertionError(name)


def test_rank_zero_alone_reads_all_weights_and_each_rank_refuses_broken_ones(on_ranks):
    module = torch.nn.Linear(2, 2)

    def refused(rank):
        weights = module.state_dict() if rank == 0 else Unread(module.state_dict())
        refuse_lost_numbers("checkpoint w", weights, module)
        module.bias.data[1] = torch.nan
        with pytest.raises(UserError) as error:
            refuse_lost_numbers("checkpoint w", weights, module)
        return str(error.value)

    first, second = on_ranks(2, refused)
    assert first.startswith("checkpoint w has weights that are not finite, such as bias; move it")
    assert second == first


def anonymous_bytes():
    """Return this process's memory that is no mapped file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't count mapped files apart")
def test_a_rank_that_resumes_has_no_second_copy_in_its_memory(on_ranks, tmp_path):
    def trained():
        model = torch.nn.Linear(2048, 2048, bias=False)  # 16 MiB
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_load_state_dict_post_hook(copy_restored_state)
        return model, optimizer

    model, optimizer = trained()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    path = checkpoint_path(tmp_path, 1)
    content = {"config": {}, "tokenizer": {}, "state_dict": model.state_dict()}
    write_checkpoint({**content, "optimizer_states": [optimizer.state_dict()]}, path)

    def growth(_rank):
        model, optimizer = trained()
        before = anonymous_bytes()
        content = AtomicCheckpointIO().load_checkpoint(path)
        model.load_state_dict(content["state_dict"])
        optimizer.load_state_dict(content["optimizer_states"][0])
        assert content["state_dict"]["weight"].sum() == model.weight.sum()
        return anonymous_bytes() - before

    # Two moments per weight, 32 MiB, or less where a rank had freed memory; and not the file, which
    # is another 48 MiB.
    sizes = on_ranks(3, growth)
    assert all(size < 44 * MIB for size in sizes), sizes


def test_a_restored_optimizer_keeps_no_number_in_the_file(new_run, tmp_path):
    run = new_run(max_steps=1)
    run.fit(run.checkpoints(tmp_path))
    (path,) = tmp_path.glob("*.ckpt")
    expected = torch.load(path)["optimizer_states"][0]["state"]
    (optimizer,) = new_run(max_steps=1).fit(strategy=SingleDeviceStrategy()).optimizers
    optimizer.load_state_dict(read_verified(verify(path))["optimizer_states"][0])
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    state = optimizer.state_dict()["state"]
    assert state.keys() == expected.keys() != set()
    for number, values in expected.items():
        for name, value in values.items():
            assert torch.equal(state[number][name], value), (number, name)
