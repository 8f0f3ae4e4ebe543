"""Ranks that a launcher starts: one run that all agree on, and what can prevent it."""

import shutil
import socket
from types import SimpleNamespace

import pytest
from torch.distributed import DistBackendError

from lockstep_gpt.config import RunError, UserError, groups
from lockstep_gpt.launch import launcher as joining
from lockstep_gpt.launch.launcher import agree
from lockstep_gpt.run.directory import RunDirectory

SKEWED = """
import os, time
from lockstep_gpt import cli
def main(words):
    time.sleep(float(os.environ["RANK"]))
    return cli.main(words)
"""


@pytest.fixture
def joined(command):
    """Run a command on two ranks of a launcher, one late; return status, out, and err."""

    def launch(*words: list[str]) -> tuple[list[int], str, str]:
        (command.folder / "skewed.py").write_text(SKEWED)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(command.folder)}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            command.start(*each, target="skewed:main", RANK=rank, LOCAL_RANK=rank, **same, **sizes)
            for rank, each in zip(("0", "1"), words, strict=True)
        ]
        said = [rank.communicate(timeout=240) for rank in ranks]
        return [rank.returncode for rank in ranks], *map("".join, zip(*said, strict=True))

    return launch


@pytest.mark.usefixtures("quick_ranks")
def test_joined_ranks_share_a_run_directory_that_rank_zero_names(command, joined):
    statuses, out, err = joined(*[command.smoke("trainer=cpu", "max_steps=10")] * 2)
    assert statuses == [0, 0], err
    (run,) = (command.folder / "runs").iterdir()
    assert (run / "config.yaml").is_file()
    assert out.count("val_loss") == 1


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.skipif(not hasattr(groups()["batch"], "exact_micro_size"), reason="no such extra")
def test_joined_ranks_give_the_bits_of_one_rank(command, joined):
    words = command.smoke("batch.exact_micro_size=2", "model.dropout=0.1", "run_dir=joined")
    statuses, _, err = joined(*[[*words, "trainer=cpu"]] * 2)
    assert statuses == [0, 0], err
    command.train("batch.exact_micro_size=2", "model.dropout=0.1", "run_dir=one")
    joined_summary, one = command.summary("joined"), command.summary("one")
    assert (joined_summary["world_size"], one["world_size"]) == (2, 1)
    assert joined_summary["weights"] == one["weights"] != {}


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("word", "instead"), [("optim.lr=0.5", "0.003"), ("launch.grace_seconds=3.0", "60.0")]
)
def test_joined_rank_with_another_configuration_is_named(command, joined, word, instead):
    words = command.smoke("trainer=cpu")
    statuses, _, err = joined(words, [*words, word])
    assert 0 not in statuses
    line = f"rank 1 has a different configuration than rank 0: {word} instead of {instead}"
    assert line in err
    assert not list((command.folder / "runs").iterdir())


@pytest.mark.usefixtures("quick_ranks")
def test_a_mistake_in_a_resume_of_joined_ranks_leaves_the_run_unchanged(finished, command, joined):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    words = ("train", "run_dir=run", "resume=auto", "resume_force=true", "model.n_layer=3")
    mistake = ("trainer.devices=2", "max_steps=30", "+callbacks.bad._target_=nowhere.Bad")
    statuses, _, err = joined(*[[*words, *mistake]] * 2)
    assert (statuses, "Traceback" in err, "nowhere.Bad" in err) == ([2, 2], False, True), err
    assert (command.folder / "run/config.yaml").read_bytes() == frozen


def test_a_folder_that_only_looks_shared_is_named(on_ranks, tmp_path):
    runs = [RunDirectory(tmp_path / f"machine{number}") for number in range(2)]
    for number, run in enumerate(runs):  # before any rank reads them
        run.path.mkdir()
        run.config.write_text(f"seed: {number}\n")

    def compare(rank):
        run = runs[rank // 2]
        try:
            return joining.refuse_other_directory(run)
        except UserError as error:
            return str(error)

    assert on_ranks(2, compare) == [None, None]
    rule = "of rank 2, 3 is not rank 0's folder; name one that all nodes share"
    first, *_, last = on_ranks(4, compare)
    assert (first, last) == tuple(f"run_dir={tmp_path}/machine{n} {rule}" for n in (0, 1))


def test_devices_that_disagree_with_a_launcher_are_rejected(command):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = command.train("trainer=cpu", "trainer.devices=4", status=2, **environment)
    assert "trainer.devices=4 but the launcher started 2" in result.stderr


@pytest.mark.parametrize(("error", "status"), [(UserError, 2), (RunError, 1)])
def test_temporary_failures_and_mistakes_have_different_statuses(capsys, error, status):
    def create():
        raise error("no room for it")

    assert agree({}, create, lambda: None) == status
    assert "no room for it" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 2, 75, 130])
def test_a_rank_that_failed_leaves_without_waiting_for_the_others(monkeypatch, status):
    monkeypatch.setattr(joining.ranks, "join", lambda *_: None)
    monkeypatch.setattr(joining, "agree", lambda *_: SimpleNamespace(load=lambda: None))
    monkeypatch.setattr(joining.start, "prepared", lambda _: None)
    monkeypatch.setattr(joining.train, "main", lambda _: status)
    ended = []
    monkeypatch.setattr(joining, "end_process", ended.append)
    assert joining.join({}, None, None, None) == status
    assert ended == [status] * (status in (1, 75))  # a mistake, status 2, leaves the run unchanged


def test_an_nccl_error_is_not_reported_as_a_failed_rendezvous(monkeypatch):
    def refuse(*_):
        raise DistBackendError("NCCL error: invalid usage\nDuplicate GPU detected : rank 1 and")

    monkeypatch.setattr(joining.ranks, "join", refuse)
    monkeypatch.setattr(joining, "asked", lambda *_: ["cause   two ranks", ""])
    with pytest.raises(RunError) as refused:
        joining.join({}, None, None, None)
    assert str(refused.value) == (
        "the launcher's ranks cannot connect (NCCL error: invalid usage; Duplicate GPU detected : "
        "rank 1 and)\ncause   two ranks"
    )
