"""A tracker that fails, hangs, or ends threads is one warning; the run and metrics.csv go on."""

import csv
import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger

from lockstep.errors import UserError
from lockstep.loggers.tracker_guard import TrackerGuard
from lockstep.loggers.tracking import TrackedRun, tracked_runs
from lockstep.run.directory import RunDirectory

wandb = pytest.importorskip("wandb", reason="wandb is not installed")
wandb_module = pytest.importorskip("lockstep.loggers.wandb_run")

CONFIG = {"run_name": "mine", "log_every": 1}


class Fails(BaseException):
    """What no `except Exception` catches."""


class Tracker(Logger):
    """A user's logger that does in `log_metrics` what a test wants."""

    name = version = "mine"

    def __init__(self, action=None):
        super().__init__()
        self.action = action
        self.rows = []

    @property
    def experiment(self):
        return self.rows

    def log_hyperparams(self, *_):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics, threading.current_thread().name))
        if self.action is not None and step == 2:
            self.action()


def end(error):
    raise error


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a logger under a guard with a limit."""

    def start_logger(kind, *words, seconds=60.0, name="mine", **named):
        guard = TrackerGuard(name, seconds, RunDirectory(tmp_path))
        return guard.start(kind, partial(kind, *words, **named))

    return start_logger


@pytest.fixture
def warnings_of(caplog):
    """Return a function that returns the warnings which name a tracker."""
    caplog.set_level(logging.WARNING)
    return lambda name: [line for line in caplog.messages if line.startswith(f"{name} ")]


@pytest.mark.parametrize(
    "error", [OSError(28, "full"), SystemExit(3), Fails("x"), KeyboardInterrupt]
)
def test_the_first_failure_is_one_warning_and_ends_the_calls(start, warnings_of, tmp_path, error):
    tracker = Tracker(partial(end, error))
    guarded = start(lambda: tracker)
    experiment = guarded.experiment
    for step in range(1, 5):
        assert guarded.log_metrics({"loss": 1.0}, step) is None
    assert [step for step, _, _ in tracker.rows] == [1, 2]
    (line,) = warnings_of("mine")
    assert "mine no longer records this run, from step 2 on (log_metrics: " in line
    assert f"{tmp_path / 'metrics.csv'} has every row" in line
    experiment.append("a call after the end")
    guarded.experiment.log_anything("a call after the end")
    guarded.finalize("success")
    assert len(tracker.rows) == 2
    assert len(warnings_of("mine")) == 1


def test_a_call_that_hangs_is_given_up_after_the_limit(start, warnings_of):
    release = threading.Event()
    tracker = Tracker(release.wait)
    guarded = start(lambda: tracker, seconds=0.2)
    for step in range(1, 5):
        guarded.log_metrics({}, step)
    release.set()
    (line,) = warnings_of("mine")
    assert "(log_metrics: no answer in 0.2 s)" in line
    assert [step for step, _, _ in tracker.rows] == [1, 2]


def test_a_guarded_logger_behaves_like_itself(start):
    guarded = start(Tracker)
    assert isinstance(guarded, Tracker)
    assert not isinstance(guarded, TrackedRun)
    assert guarded.name == "mine"
    guarded.log_metrics({"a": 1}, step=1)
    guarded.experiment.append("added by a callback")
    assert guarded.rows[1:] == ["added by a callback"]
    guarded.rows = []
    assert guarded.rows == []
    assert not hasattr(guarded, "unknown")
    assert isinstance(start(CSVLogger, "folder"), CSVLogger)


def test_calls_of_one_tracker_share_a_thread_of_its_own(start):
    guarded = start(Tracker, name="first")
    guarded.log_metrics({}, 1)
    guarded.log_metrics({}, 3)
    assert {thread for _, _, thread in guarded.rows} == {"first"}


def test_a_thread_ends_with_its_guard(tmp_path):
    guard = TrackerGuard("short", 60.0, RunDirectory(tmp_path))
    assert guard.call("add", sum, [1, 2]) == 3
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "short"]
    del guard
    thread.join(60)
    assert not thread.is_alive()


def test_a_tracker_that_cannot_start_is_a_warning_and_a_mistake_is_an_error(start, warnings_of):
    class Unreachable(Tracker):
        def __init__(self):
            raise ConnectionError("no network")

    guarded = start(Unreachable)
    (line,) = warnings_of("mine")
    assert "mine does not record this run (ConnectionError: no network)" in line
    assert isinstance(guarded, Unreachable)
    guarded.log_metrics({}, 1)
    guarded.experiment.log({})
    with pytest.raises(UserError, match="is not one of"):
        start(partial(end, UserError("a is not one of b")))


@pytest.fixture
def full_disk(tmp_path):
    """Return a folder on a small file system of its own, and a function that fills it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("only root, where it may mount, can make a full disk")

    def fill():
        with (folder / "filler").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError:
                    return

    yield folder, fill
    # A run of wandb that failed isn't finished: a later line to its log would need the disk.
    trackers = logging.getLogger("wandb")
    for handler in [*trackers.handlers]:
        if Path(getattr(handler, "baseFilename", "")).is_relative_to(folder):
            trackers.removeHandler(handler)
            handler.close()
    subprocess.run(["umount", "-l", str(folder)], check=True)


def wandb_run(folder):
    directory = RunDirectory(folder)
    return wandb_module.WandbRun(directory=directory, config=CONFIG, mode="offline", project="p")


def mlflow_run(folder):
    return MLFlowLogger("e", "mine", f"sqlite:///{folder}/mlflow.db")


def tensorboard_run(folder):
    return TensorBoardLogger(folder, name="tensorboard", version="", default_hp_metric=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # MLflow's
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
@pytest.mark.parametrize("kind", [wandb_run, mlflow_run, tensorboard_run])
def test_a_full_disk_of_a_tracker_ends_no_run(full_disk, start, warnings_of, monkeypatch, kind):
    folder, fill = full_disk
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # MLflow sets it, also for later tests
    guarded = start(kind, folder)
    guarded.log_metrics({"loss": 1.0}, 1)
    fill()
    for step in range(2, 40):
        guarded.log_metrics({f"loss/{number}": 1.0 for number in range(100)}, step)
    for run in tracked_runs([guarded]):
        run.close("done")
    guarded.finalize("success")
    (line,) = warnings_of("mine")
    assert "no longer records this run" in line
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("tensorboard"):
            thread.join(5)  # so that its exception is not taken for one of the next test
    (folder / "filler").unlink()


OF_USERS = """
import os
import lightning
import wandb
from lightning.pytorch.loggers import CSVLogger, WandbLogger

class Signals(lightning.Callback):
    "Sends a signal to wandb's process before a step, and logs a row of its own in each."
    def __init__(self, step, number):
        self.step, self.number = step, number
    def on_train_batch_start(self, trainer, *_):
        service = wandb.setup()._connection  # None if a slow machine has not started it in time
        if service and trainer.is_global_zero and trainer.global_step == self.step:
            os.kill(service._proc._process.pid, self.number)
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            (tracker,) = [one for one in trainer.loggers if isinstance(one, WandbLogger)]
            tracker.experiment.log({"mine": 1.0})
            wandb.log({"mine": 2.0})

class Ends(CSVLogger):
    "Ends the process, as it thinks, at a row."
    def log_metrics(self, metrics, step=None):
        raise SystemExit(5)
"""


@pytest.fixture
def train(command, quick_ranks):  # noqa: ARG001
    """Return a function that trains with a module `users`, 20 steps with a row for each."""
    (command.folder / "users.py").write_text(OF_USERS)

    def run(*words, **options):
        usual = ("trainer=cpu", "max_steps=20", "log_every=1", "trust_run_dir=true")
        return command.train(*usual, *words, PYTHONPATH=str(command.folder), **options)

    return run


def steps_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["trainer/step"]) for row in csv.DictReader(file) if row["train/loss"]]


def lines_of(folder, name):
    log = (folder / "train.log").read_text(encoding="utf-8")
    return [line for line in log.splitlines() if line.startswith(f"{name} ")]


def signals(step, number):
    return (
        "+callbacks.signals._target_=users.Signals",
        f"+callbacks.signals.step={step}",
        f"+callbacks.signals.number={int(number)}",
    )


@pytest.mark.slow
def test_two_ranks_train_on_without_wandb_s_process_and_a_broken_tracker(train, command):
    ended = train(
        "run_dir=run",
        "trainer.devices=2",
        "logger=[wandb,tensorboard]",
        "+logger.ends._target_=users.Ends",
        "+logger.ends.save_dir=out",
        *signals(9, signal.SIGKILL),
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = command.folder / "run"
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("done", True)
    assert steps_of(folder) == list(range(1, 21))
    (line,) = lines_of(folder, "wandb")
    assert "wandb sync " in line
    assert ["SystemExit: 5" in line for line in lines_of(folder, "ends")] == [True]
    assert "Traceback" not in ended.stdout + ended.stderr
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    logged = [scalar.step for scalar in events.Scalars("train/loss")]
    assert logged == list(range(20))  # Lightning counts steps from 0


@pytest.mark.slow
def test_a_run_ends_well_if_wandb_s_process_hangs_and_continues_its_id(train, command):
    train("run_dir=run", "logger=wandb", *signals(9, signal.SIGSTOP))
    first = command.summary("run")
    assert (first["status"], first["saved"]) == ("done", True)
    assert steps_of(command.folder / "run") == list(range(1, 21))
    (line,) = lines_of(command.folder / "run", "wandb")
    assert "no answer in 30 s" in line
    words = ["run_dir=run", "resume=auto", "max_steps=25", "callbacks.signals=null"]
    command("train", *words, PYTHONPATH=str(command.folder))
    assert command.summary("run")["wandb_run_id"] == first["wandb_run_id"]
    folders = [*(command.folder / "run/wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all(folder.name.endswith(first["wandb_run_id"]) for folder in folders)


@pytest.mark.slow
def test_a_process_of_wandb_that_cannot_be_reached_at_the_start_is_a_warning(train, command):
    ended = train("run_dir=run", "logger=wandb", WANDB_SERVICE="3-1-unix-/none")
    assert command.summary("run")["saved"] is True
    (line,) = lines_of(command.folder / "run", "wandb")
    assert line.startswith("wandb does not record this run (")
    assert "Traceback" not in ended.stdout + ended.stderr


def test_wandb_still_has_the_private_names_that_the_guard_uses(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = []
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True))
    run._log = lambda *words, **named: rows.append((words, named))
    wandb.log({"a": 1})
    assert len(rows) == 1
    assert wandb.setup()._connection._proc._process.poll() is None
    run.finish()


IMPORTS = """
import sys
from lockstep.patches import wandb as wandb_patches
import wandb
before = {*sys.modules}
run = wandb.init(mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True))
late = sorted(name for name in {*sys.modules} - before if name.startswith("wandb."))
run.finish()
print(len(late), *late)
"""


@pytest.mark.slow
def test_what_a_start_of_wandb_imports_has_been_imported_with_its_patches(tmp_path):
    words = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=240)
    count, *late = ended.stdout.split()
    assert not [name for name in late if "launch" in name]
    assert int(count) < 20, late


def test_only_a_first_start_lists_the_installed_packages(tmp_path, monkeypatch):
    def lists_packages(count):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        place = {"dir": str(tmp_path), "id": f"attempt{count}"}
        run = wandb_module.start_run("offline", 30.0, **place)
        run.finish()
        return (Path(run.dir) / "requirements.txt").exists()

    assert lists_packages("0")
    assert not lists_packages("1")
