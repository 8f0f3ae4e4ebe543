"""Killed ranks with shards continue from those in memory."""

import re

import pytest
import torch

from lockstep.checkpoints.reading import read_checkpoint

SHARDED = ("trainer=cpu", "strategy=fsdp2", "memory=4", "checkpoint.every=20")
# Kills the ranks named for a step, once; a negative one first damages its newest shards.
KILL = """
import os, pathlib, signal, lightning
from lockstep.run.directory import RunDirectory
from lockstep.memory.files import HEADER_BYTES, identity_of, states_in
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        step, rank, victims = trainer.global_step, trainer.global_rank, {victims}
        note = pathlib.Path(f"killed-{{step}}-{{rank}}")
        here = {{rank, -rank}} & {{*victims.get(step, ())}}
        if not here or note.exists():
            return
        note.touch()
        if min(here) < 0:
            damage(rank, RunDirectory(pathlib.Path(trainer.default_root_dir)))
        os.kill(os.getpid(), signal.SIGKILL)
def damage(rank, directory):
    states = states_in(identity_of(directory))
    newest = next(state for state in states if state.header.part["rank"] == rank)
    with newest.path.open("r+b") as file:
        file.seek(HEADER_BYTES + 1000)
        file.write(b"damaged")
"""


def content(folder, step=20):
    return read_checkpoint(folder / f"checkpoints/step={step:06d}.ckpt")


def assert_same_bits(ours, theirs):
    """Compare everything but the time and place of two checkpoints."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_same_bits(ours[name], theirs[name])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same_bits(our, their)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)


@pytest.fixture
def killed(command):
    """Train on some ranks, of which several are killed; return what was printed."""

    def train(victims, *words, status=0):
        (command.folder / "killer.py").write_text(KILL.format(victims=victims))
        kill = ("+callbacks.kill._target_=killer.Kill", "run_dir=hit")
        place = {"PYTHONPATH": str(command.folder)}
        return command.train(*SHARDED, *words, *kill, status=status, **place)

    return train


KINDS = {
    "adamw": ("trainer.devices=2", "model.dropout=0.1"),
    "muon": ("trainer.devices=2", "optim=muon"),
    "parts": ("trainer.devices=2", "strategy.save_parts=true"),
    "three": ("trainer.devices=3", "batch.global_size=9"),
    "tensor": ("trainer.devices=2", "strategy.tensor_parallel=2"),
    "tensor-muon": ("trainer.devices=4", "strategy.tensor_parallel=2", "optim=muon"),
}


# Kinds whose ranks are killed twice, the second time all but the first rank.
TWICE = ("adamw", "three")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder for runs whose ranks nobody kills."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def whole(command, undisturbed):
    """Return the undisturbed run of some words, of which each is trained once."""

    def train(words):
        folder = undisturbed / "-".join(word.rpartition(".")[2] for word in words)
        if not folder.exists():
            words = (*SHARDED, *words, f"run_dir='{folder.name}'", "verbosity=quiet")
            command.elsewhere(undisturbed).train(*words)
        return folder

    return train


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_ranks_continue_from_the_shards_in_memory(command, killed, whole, kind):
    words = KINDS[kind]
    ranks = int(words[0][-1])
    kills = {7: [1], 14: [*range(1, ranks)]} if kind in TWICE else {7: [*range(1, ranks)]}
    hit = killed(kills, *words)
    assert_continued(hit, *(4, 12)[: len(kills)])
    assert_undisturbed(command.folder, whole(words))


def assert_continued(printed, *steps):
    found = re.findall(r"continues from step (\d+), kept in memory", printed.stdout)
    # Of several victims, the agent may end one before its kill, which then hits the next attempt.
    assert list(dict.fromkeys(map(int, found))) == [*steps]


def assert_undisturbed(folder, whole):
    ours, theirs = content(folder / "hit"), content(whole)
    for name in ("state_dict", "optimizer_states", "loops", "Tokens"):
        assert_same_bits(ours[name], theirs[name])


@pytest.mark.slow
def test_damaged_shards_of_one_rank_let_all_continue_from_the_state_before(command, killed, whole):
    words = KINDS["adamw"]
    hit = killed({10: [-1]}, *words)
    assert re.search(
        r"removed \S+/rank 1\.[01] from memory: it was damaged", hit.stdout + hit.stderr
    )
    assert_continued(hit, 4)
    assert_undisturbed(command.folder, whole(words))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [("trainer.devices=2", "strategy=ddp"), ("trainer.devices=1",)], ids=["ddp", "one"]
)
def test_other_ranks_join_the_shards_of_a_killed_command(command, killed, whole, place):
    words = ("trainer.devices=2",)  # with dropout, the noise would depend on the ranks
    hit = killed({7: [1]}, *words, "launch.max_restarts=0", status=1)
    assert "step 4 stays in this machine's memory (0.5 MB)" in hit.stderr
    assert not [*command.folder.glob("hit/checkpoints/*.ckpt")]
    more = ("train", "run_dir=hit", "resume=auto", *place)
    assert_continued(command(*more, PYTHONPATH=str(command.folder)), 4)
    for name in ("train_loss", "val_loss"):
        expected = command.summary(whole(words))[name]
        assert command.summary("hit")[name] == pytest.approx(expected, abs=2e-5)


@pytest.mark.slow
def test_whole_states_that_are_newer_than_joined_shards_serve(command, killed):
    words = KINDS["adamw"]
    killed({7: [1], 14: [1]}, *words, "launch.max_restarts=0", status=1)
    more = ("train", "run_dir=hit", "resume=auto", "launch.max_restarts=1", "strategy=ddp")
    assert_continued(command(*more, PYTHONPATH=str(command.folder)), 4, 12)
