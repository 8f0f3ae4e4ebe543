"""Signals to a whole run: the first decides, and repeats change nothing."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep import stop_signals
from lockstep.stop_signals import REPEAT_SECONDS

TWO_RANKS = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
# What happens in a run waits for a file, and shows with a file that it waits.
WAITS = """
import os, time, lightning

def wait(name):
    if os.path.exists("wait in " + name):
        open("waits in " + name, "w").close()
        while os.path.exists("wait in " + name):
            time.sleep(0.02)

class Waits(lightning.Callback):
    def __init__(self):
        wait("assembly")

    def on_train_batch_start(self, *_):
        wait("step")

    def on_save_checkpoint(self, *_):
        wait("save")

    def on_validation_end(self, trainer, *_):
        if trainer.global_step == trainer.max_steps:
            wait("last validation")
"""
CALLBACK = "+callbacks.waits._target_=waits.Waits"
LONG = ("max_steps=100000", CALLBACK)
RUN = ("-m", "lockstep_gpt")


@pytest.fixture
def start(command):
    """Start the real program on an experiment with `Waits`."""
    (command.folder / "waits.py").write_text(WAITS)

    def start_run(*words):
        run_dir = f"run_dir={command.folder}/run"
        environment = {"PYTHONPATH": str(command.folder)}
        return command.start_python(*RUN, *command.smoke(run_dir, *words), **environment)

    return start_run


@pytest.fixture
def let_wait(command, wait_for):
    """Let what has a name wait from now on; return a function that waits until it does."""

    def let(name):
        (command.folder / f"wait in {name}").touch()
        return lambda: wait_for((command.folder / f"waits in {name}").exists)

    return let


@pytest.fixture
def go_on(command):
    """Let what has a name wait no longer."""
    return lambda name: (command.folder / f"wait in {name}").unlink()


def ended(process):
    """Return the exit status and the output of a process, which has no traceback."""
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in out + err, out + err
    assert "SignalException" not in out + err, out + err
    return process.returncode, out


@pytest.mark.slow
def test_signals_during_the_save_change_nothing_for_any_process(
    command, start, let_wait, go_on, wait_for_checkpoint, processes_of
):
    process = start(*LONG, *TWO_RANKS)
    wait_for_checkpoint(command.folder / "run")
    wait_until_it_saves = let_wait("save")
    process.send_signal(signal.SIGHUP)
    wait_until_it_saves()
    for signum in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        for pid in {process.pid, *processes_of(command.folder)}:
            os.kill(pid, signum)
        time.sleep(0.05)
    go_on("save")
    status, out = ended(process)
    assert status == 128 + signal.SIGHUP
    assert out.splitlines()[-1].startswith("stopped by SIGHUP; step ")
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("stopped", True)
    assert summary["last_checkpoint"].endswith(f"step={summary['step']:06d}.ckpt")
    assert not processes_of(command.folder)


def test_only_an_explicit_second_interrupt_stops_without_a_save(
    command, start, let_wait, wait_for_checkpoint
):
    process = start(*LONG, "launch.grace_seconds=500")
    wait_for_checkpoint(command.folder / "run")
    wait_until_a_step_hangs = let_wait("step")
    wait_until_a_step_hangs()
    process.send_signal(signal.SIGINT)
    time.sleep(2 * REPEAT_SECONDS)
    process.send_signal(signal.SIGINT)
    status, out = ended(process)
    assert status == 128 + signal.SIGINT
    *_, saving, at_once, last = filter(None, out.splitlines())
    assert saving == "saving after this step; press Ctrl-C again to stop at once"
    assert at_once == "stopping at once, without a save"
    assert last.startswith("stopped by SIGINT before all ranks saved; step ")
    assert command.summary("run")["saved"] is False


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_leaves_nothing_and_the_same_command_works(
    command, start, let_wait, go_on
):
    wait_until_it_assembles = let_wait("assembly")
    process = start("max_steps=6", CALLBACK)
    wait_until_it_assembles()
    process.send_signal(signal.SIGINT)
    status, out = ended(process)
    assert status == 128 + signal.SIGINT
    line = "stopped by SIGINT before the first step; nothing is kept: start it again"
    assert out.splitlines()[-1] == line
    assert not (command.folder / "run").exists()

    go_on("assembly")
    wait_until_it_validates = let_wait("last validation")
    process = start("max_steps=6", CALLBACK)
    wait_until_it_validates()
    process.send_signal(signal.SIGTERM)  # too late: it is about to end anyway
    go_on("last validation")
    status, out = ended(process)
    assert status == 0
    assert "\ndone in " in out
    assert command.summary("run")["status"] == "done"


# A compiler that a kernel keeps busy until a file says that a signal has come. torch knows its kind
# by its name.
COMPILER = """#!{python}
import os, sys, time
if any(word.endswith(".main.cpp") for word in sys.argv[1:]):
    open("{folder}/compiles", "w").close()
    while not os.path.exists("{folder}/signaled"):
        time.sleep(0.05)
os.execvp("g++", ["g++", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
def test_a_signal_that_also_ends_a_compiler_is_told_as_a_stop(command, wait_for, processes_of):
    compiler = command.folder / "g++"
    compiler.write_text(COMPILER.format(python=sys.executable, folder=command.folder))
    compiler.chmod(0o755)
    settings = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(command.folder / "kernels")}
    words = command.smoke(f"run_dir={command.folder}/run", "trainer=cpu", "compile=true")
    process = command.start_words([sys.executable, *RUN, *words], **settings)  # not a fork
    wait_for(lambda: (command.folder / "compiles").exists() or process.poll() is not None)
    for pid in {process.pid, *processes_of(command.folder)}:
        os.kill(pid, signal.SIGINT)
    (command.folder / "signaled").touch()
    status, out = ended(process)
    assert status == 128 + signal.SIGINT
    line = "stopped by SIGINT before the first step; nothing is kept: start it again"
    assert out.splitlines()[-1] == line
    assert not (command.folder / "run").exists()


def test_only_a_compiler_s_error_after_a_signal_is_a_stop(monkeypatch):
    error = RuntimeError("it does not compile")
    error.__cause__ = subprocess.CalledProcessError(-signal.SIGTERM, "g++")
    monkeypatch.setattr(stop_signals, "received", stop_signals.StopSignals())
    assert not stop_signals.ended_by_signal(error)
    stop_signals.received.handle(signal.SIGTERM, None)
    assert stop_signals.ended_by_signal(error)
    assert not stop_signals.ended_by_signal(RuntimeError("of the model"))


PREPARES = """
import sys, time
import lockstep_gpt
from lockstep import commands as cli
from lockstep.launch import devices
def hang(*_):
    open("prepares", "w").close()
    time.sleep(600)
devices.found = hang
cli.run()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)
def test_a_signal_before_there_is_a_run_ends_with_one_line(command, wait_for, signum):
    process = command.start_python("-c", PREPARES, *command.smoke("run_dir=run"))
    wait_for((command.folder / "prepares").exists)
    process.send_signal(signum)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signum
    assert out == ""
    assert err.endswith(f" train: stopped by {signum.name} before training began\n")
    assert len(err.splitlines()) == 1
    assert not (command.folder / "run").exists()


def test_an_inline_run_saves_once_and_ends_with_the_first_signal(
    command, start, let_wait, go_on, wait_for_checkpoint
):
    process = start(*LONG, "launch.inline=true")
    wait_for_checkpoint(command.folder / "run")
    wait_until_it_saves = let_wait("save")
    process.send_signal(signal.SIGUSR1)
    wait_until_it_saves()
    process.send_signal(signal.SIGTERM)
    go_on("save")
    status, out = ended(process)
    assert status == 128 + signal.SIGUSR1
    assert out.splitlines()[-1].startswith("stopped by SIGUSR1; step ")


def state_of(pid):
    """Return the state of a process, such as T: it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_a_stopped_command_go_on_and_it_tells_how_they_ended(
    command, python_of_forks, wait_for
):
    run = command.folder / "run"
    summary = run / "summary.json"
    words = command.smoke("max_steps=60", "launch.max_restarts=0", *TWO_RANKS, f"run_dir={run}")
    process = subprocess.Popen(
        # In a group of its own, as a shell starts it.
        [sys.executable, "-c", STARTS, python_of_forks, *words],
        cwd=command.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    try:
        wait_for((run / "metrics.csv").exists)
        process.send_signal(signal.SIGTSTP)
        wait_for(lambda: state_of(process.pid) == "T")
        wait_for(lambda: summary.exists() and '"done"' in summary.read_text())
        assert state_of(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    assert "\ndone in " in out


# A command whose agent and ranks are forks.
STARTS = """
import sys
sys.executable = sys.argv[1]
import lockstep_gpt
from lockstep import commands as cli
sys.exit(cli.main(sys.argv[2:]))
"""
# A process in a group of its own presses Ctrl-Z, and its parent continues it after 7 s.
GUARDED = """
import os, signal, sys, time
from lightning import LightningModule, Trainer
from lockstep.callbacks.guards import Guards

pid = os.fork()
if pid:
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status
    time.sleep(7)
    os.kill(pid, signal.SIGCONT)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
os.setpgid(0, 0)
guards = Guards(stall_after=6, replicas_every=None)
trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
guards.on_train_start(trainer, LightningModule())
os.kill(os.getpid(), signal.SIGTSTP)
time.sleep(1.5)  # more than twice the time between its looks
guards.on_train_end()
"""


@pytest.mark.slow
def test_a_limit_on_stalls_does_not_count_a_pause(command):
    assert ended(command.start_python("-c", GUARDED))[0] == 0
