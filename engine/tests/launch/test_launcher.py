"""Ranks that a launcher starts: one run that all agree on, and what can prevent it."""

import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lockstep.errors import ReportedError, RunError, UserError
from lockstep.launch import launcher, start
from lockstep.launch.start import NewRun

SKEWED = """
import os, time
import lockstep_gpt
from lockstep import commands as cli
def main(words):
    time.sleep(float(os.environ["RANK"]))
    return cli.main(words)
"""


@pytest.fixture
def joined(command):
    """Run a command on two ranks of a launcher, one late; return status, out, and err."""

    def launch(*commands: list[str]) -> tuple[list[int], str, str]:
        (command.folder / "skewed.py").write_text(SKEWED)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(command.folder)}
        sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        ranks = [
            command.start(*words, target="skewed:main", RANK=rank, LOCAL_RANK=rank, **same, **sizes)
            for rank, words in zip(("0", "1"), commands, strict=True)
        ]
        outputs = [rank.communicate(timeout=240) for rank in ranks]
        return [rank.returncode for rank in ranks], *map("".join, zip(*outputs, strict=True))

    return launch


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_joined_ranks_share_a_run_directory_that_rank_zero_names(command, joined):
    statuses, out, err = joined(*[command.smoke("trainer=cpu", "max_steps=10")] * 2)
    assert statuses == [0, 0], err
    (run,) = (command.folder / "runs").iterdir()
    assert (run / "config.yaml").is_file()
    assert out.count("val_loss") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_joined_ranks_give_the_bits_of_one_rank(command, joined):
    words = command.smoke("batch.exact_micro_size=2", "model.dropout=0.1", "run_dir=joined")
    statuses, _, err = joined(*[[*words, "trainer=cpu"]] * 2)
    assert statuses == [0, 0], err
    command.train("batch.exact_micro_size=2", "model.dropout=0.1", "run_dir=one")
    joined_summary, one = command.summary("joined"), command.summary("one")
    assert (joined_summary["world_size"], one["world_size"]) == (2, 1)
    assert joined_summary["weights"] == one["weights"] != {}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("word", "instead"), [("optim.lr=0.5", "0.003"), ("launch.grace_seconds=3.0", "60")]
)
def test_joined_rank_with_another_configuration_is_named(command, joined, word, instead):
    words = command.smoke("trainer=cpu")
    statuses, _, err = joined(words, [*words, word])
    assert 0 not in statuses
    line = f"rank 1 has a different configuration than rank 0: {word} instead of {instead}"
    assert line in err
    assert not (command.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_mistake_in_a_resume_of_joined_ranks_leaves_the_run_unchanged(finished, command, joined):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    frozen = (command.folder / "run/config.yaml").read_bytes()
    words = ("train", "run_dir=run", "resume=auto", "resume_force=true", "model.n_layer=3")
    mistake = ("trainer.devices=2", "max_steps=30", "+callbacks.bad._target_=math.Bad")
    statuses, _, err = joined(*[[*words, *mistake]] * 2)
    assert (statuses, "Traceback" in err, "math.Bad" in err) == ([2, 2], False, True), err
    assert (command.folder / "run/config.yaml").read_bytes() == frozen


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_ranks_of_a_launcher_continue_a_run_of_another_number(finished, command, joined):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    statuses, out, err = joined(*[["train", "run_dir=run", "resume=auto", "max_steps=22"]] * 2)
    assert statuses == [0, 0], err
    assert "trainer.devices: 1 -> 2\n" in out
    assert command.summary("run")["world_size"] == 2


def test_devices_that_disagree_with_a_launcher_are_rejected(command):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    result = command.train("trainer=cpu", "trainer.devices=4", status=2, **environment, **place)
    assert "trainer.devices=4 but the launcher started 2" in result.stderr
    assert "; set trainer.devices=auto, or start 4; " in result.stderr


def test_variables_of_a_launcher_that_is_not_there_are_named(command):
    result = command.train("trainer=cpu", status=2, RANK="0", WORLD_SIZE="2")
    assert result.stderr == (
        "lockstep-gpt train: RANK=0 and WORLD_SIZE=2 are set, but MASTER_ADDR and "
        f"MASTER_PORT are not; {launcher.UNSET}\n"
    )
    assert not (command.folder / "runs").exists()


def test_a_rank_beyond_the_world_is_refused(command):
    variables = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = command.train("trainer=cpu", status=2, **variables)
    line = f"RANK=5 must be below WORLD_SIZE=2; {launcher.UNSET}"
    assert result.stderr == f"lockstep-gpt train: {line}\n"


@pytest.mark.parametrize(("rank", "agent"), [("0", False), ("1", False), ("1", True)])
def test_a_rank_without_the_others_ends_in_one_line(command, rank, agent):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent else {}
    words = ("trainer=cpu", "launch.join_seconds=1", "run_dir=run")
    result = command.train(*words, status=1, **place, **sizes, **torchrun)
    place = f"rank {rank} of 2 cannot meet the others at 127.0.0.1:{port} ("
    assert result.stderr.startswith(f"lockstep-gpt train: {place}")
    assert "unset RANK WORLD_SIZE" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (command.folder / "run").exists()


class Store:
    """The store of two ranks, without waiting: the other rank has set its values before."""

    def __init__(self, **values):
        self.values = values

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


@pytest.mark.parametrize("error", [UserError, RunError])
def test_mistakes_and_events_of_rank_zero_end_the_others_with_its_status(monkeypatch, error):
    def freeze():
        raise error("no room for it")

    store = Store(**{"rank 1 leaves": b""})
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(error, match="no room for it"):
        launcher.agree(store, {}, freeze)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ReportedError) as reported:
        launcher.agree(store, {}, None)
    assert reported.value.status == error.status


def test_a_lost_store_is_an_event_not_a_mistake(monkeypatch):
    class Lost(Store):
        def check(self, _keys):
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunError, match="rank 1 lost the other ranks before training"):
        launcher.agree(Lost(), {}, None)


def test_the_other_ranks_wait_for_rank_zero_s_configuration_only_so_long(monkeypatch):
    monkeypatch.setattr(launcher, "FREEZE_SECONDS", 0.03)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RunError, match="rank 0 did not come within"):
        launcher.agree(Store(), {}, None)


@pytest.mark.parametrize("status", [0, 1, 2, 75, 130])
def test_a_rank_that_failed_leaves_without_waiting_for_the_others(monkeypatch, status, tmp_path):
    run = SimpleNamespace(values=dict, config=tmp_path / "none")
    monkeypatch.setattr(start, "mode_of", lambda _: start.StartMode.LAUNCHER)
    monkeypatch.setattr(launcher, "meet", lambda _: None)
    monkeypatch.setattr(launcher, "agree", lambda *_: run)
    monkeypatch.setattr(start, "_run_rank", lambda *_: status)
    ended = []
    monkeypatch.setattr(start, "end_process", ended.append)
    assert start.start(NewRun(run, {}, "a:b", dict), print) == status
    assert ended == [status] * (status in (1, 75))  # a mistake, status 2, leaves the run unchanged


# Adopts orphans, as systemd does.
ADOPTER = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(os.getpid())])
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.execvpe("sleep", ["sleep", "600"], {"PATH": os.environ["PATH"]})
"""
# Starts a rank, and ends before the rank knows whose it is.
LAUNCHER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
RANK = """
import os, sys, time
from lockstep.launch.launcher import end_with_launcher
while len(sys.argv) > 1 and os.getppid() != int(sys.argv[1]):
    time.sleep(0.01)
end_with_launcher()
print("goes on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, only process 1 adopts")
@pytest.mark.parametrize(("variable", "printed"), [("TORCHELASTIC_RUN_ID", ""), ("X", "goes on\n")])
def test_a_rank_of_torchrun_ends_if_torchrun_has_ended_before(variable, printed):
    words = [sys.executable, "-c", ADOPTER, LAUNCHER, RANK]
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", variable: "1"}
    adopter = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert adopter.stdout.read() == printed  # until all others have ended
    finally:
        adopter.kill()
        adopter.communicate()


@pytest.mark.parametrize("script", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["direct", "script"])
def test_a_rank_whose_launcher_is_there_goes_on(script):
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    words = [*script, sys.executable, "-c", RANK]
    rank = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=240)
    assert (rank.returncode, rank.stdout) == (0, "goes on\n")


def test_the_limit_of_the_meeting_is_the_run_s_setting(monkeypatch):
    from lockstep.ranks import store

    meetings = []
    monkeypatch.setattr(store, "meet", lambda *limits: meetings.append(limits))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    launcher.meet(7)
    ((*limits, hint),) = meetings
    assert limits == [3, 4, 7]
    assert hint.startswith("rank 3 of 4 meets them at node0:29500; start all with ")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launcher.meet(7) is None
