"""Whatever process of a run is killed, at whatever moment, none is left: the page on runs."""

import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.run import lock
from lockstep.run.directory import RunDirectory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
LONG = ("max_steps=99999", "checkpoint.every=2", "run_dir=run")
TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp", "launch.max_restarts=0")
WANDB = ("logger=wandb", "logger.wandb.mode=offline")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lockstep_gpt")
# A part of the words with which a process was started: what it is.
ROLES = {
    "agent": "agent_program",
    "rank": "rank_program",
    "rank of torchrun": "lockstep_gpt train",
    "service of wandb": "wandb-core",
}


@dataclass
class LongRun:
    """A run, which would train for hours, and all of its processes: those that work in its folder.

    Forks of a server can't be found by their environment: it is in the server's memory.
    """

    folder: Path
    process: object  # of the command or torchrun, like `subprocess.Popen`

    def processes(self):
        """Return the ids of all live processes."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (entry / "cwd").readlink() == self.folder:
                    pids.append(int(entry.name))
        return pids

    def find(self, role):
        """Return the ids of the processes with a role, the oldest first."""
        if role in ("command", "torchrun"):
            return [self.process.pid]
        pids = [pid for pid in self.processes() if pid != self.process.pid]
        return sorted(pid for pid in pids if ROLES[role] in words_of(pid))

    def is_training(self):
        """Return whether it has saved a checkpoint."""
        return any((self.folder / "run/checkpoints").glob("step=*.ckpt"))


def words_of(pid):
    """Return how a process was started."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def start(command):
    """Start a long run; `real` ones are new programs, others are forks for speed."""

    def start_run(words, real=False):
        if real:
            process = command.start_words([sys.executable, *words])
        else:
            process = command.start_python(*words)
        return LongRun(command.folder.resolve(), process)

    return start_run


@pytest.fixture
def launch(command, start):
    """Start a long run with an agent, or under torchrun."""

    def launch_run(how, *words, real=False):
        smoke = command.smoke(*LONG, *words)
        if how == "torchrun":
            return start([*TORCHRUN, *smoke, "trainer=cpu"], real)
        smoke += TWO
        if real:
            return start(["-m", "lockstep_gpt", *smoke], real)
        return LongRun(command.folder.resolve(), command.start(*smoke))

    return launch_run


@pytest.fixture
def expect_end(wait_for):
    """Wait until a run has no process; its page says 10 s, a busy machine needs more."""

    def expect(run):
        def describe():
            return "\n".join(f"{pid}: {words_of(pid)}" for pid in run.processes())

        try:
            wait_for(lambda: not run.processes(), 30, describe=describe)
        finally:
            for pid in run.processes():
                kill_if_alive(pid)
            run.process.communicate(timeout=240)

    return expect


def kill_if_alive(pid):
    """Send SIGKILL to a process, which may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# How ranks start; the process that must exist; the processes that are killed then.
EARLY = [
    ("agent", "command", "command"),
    ("agent", "agent", "command"),
    ("agent", "agent", "agent"),
    ("agent", "rank", "agent"),
    ("torchrun", "torchrun", "torchrun"),
    ("torchrun", "rank of torchrun", "torchrun"),
]
IN_TRAINING = [
    ("agent", ["command"]),
    ("agent", ["agent"]),
    ("agent", ["rank"]),
    ("torchrun", ["torchrun"]),
    ("torchrun", ["rank of torchrun"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "moment", "victim"), EARLY)
def test_a_kill_at_the_start_leaves_no_process(launch, wait_for, expect_end, how, moment, victim):
    run = launch(how, real=True)
    wait_for(lambda: run.find(moment), poll=0.001)
    kill_if_alive(run.find(victim)[0])
    expect_end(run)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "victims"), IN_TRAINING)
def test_kills_in_training_leave_no_process(launch, wait_for, expect_end, how, victims):
    run = launch(how)
    wait_for(run.is_training)
    for victim in victims:
        kill_if_alive(run.find(victim)[-1])
    expect_end(run)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [["rank"], ["service of wandb", "command"], ["command"]])
def test_kills_leave_no_service_of_wandb(launch, wait_for, expect_end, victims):
    run = launch("agent", *WANDB)
    wait_for(run.is_training)
    for victim in victims:
        kill_if_alive(run.find(victim)[0])
    expect_end(run)


@pytest.mark.slow
def test_a_stopped_rank_that_nobody_watches_keeps_other_commands_out(
    command, wait_for, monkeypatch
):
    monkeypatch.setattr(lock, "RANK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    same = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **sizes}
    words = command.smoke(*LONG, "trainer=cpu")
    ranks = [command.start(*words, RANK=rank, LOCAL_RANK=rank, **same) for rank in ("0", "1")]
    wait_for(LongRun(command.folder, ranks[0]).is_training)
    ranks[1].send_signal(signal.SIGSTOP)
    ranks[0].kill()
    ranks[0].communicate(timeout=240)
    stderr = command("train", "run_dir=run", "resume=auto", "trainer.devices=1", status=2).stderr
    user = f"process {ranks[1].pid} on {socket.gethostname()}, a rank of process {ranks[0].pid} on"
    assert f"run_dir=run is in use by {user}" in stderr
    ranks[1].kill()
    ranks[1].communicate(timeout=240)
    with RunDirectory(command.folder / "run").locked():
        pass
