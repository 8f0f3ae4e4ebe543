"""What a run logs after it was stopped at odd moments: the numbers of one that never stopped."""

import csv
import json
import re

import pytest

# One rank sends a signal to itself before a step, once.
STOPS = """
import os, pathlib, signal, time, lightning
class Stops(lightning.Callback):
    def __init__(self, plan):
        self.plan = plan
    def on_train_batch_start(self, trainer, *_):
        for entry in self.plan:
            step, rank, name = entry.split(":")
            note = pathlib.Path(f"stopped-{step}")
            here = (int(step), int(rank)) == (trainer.global_step, trainer.global_rank)
            if here and not note.exists():
                note.touch()
                time.sleep(0.5)  # the other ranks wait; the last state becomes complete
                os.kill(os.getpid(), signal.Signals[name])
"""
TIMES = ("throughput/", "system/", "data/wait_share")  # columns
TIMES_OF_SUMMARY = {
    "tokens_per_second",
    "first_step_seconds",
    "step_seconds_p50",
    "step_seconds_p95",
    "data_wait_share",
    "peak_memory_gb",
    "wall_seconds",
    "memory_every",
}
PLACES = {"wandb_run_id", "best_checkpoint", "last_checkpoint", "weights"}


def is_number_of_training(name):
    return not name.startswith(TIMES)


def rows(folder):
    """Return metrics.csv by step, without times."""
    with (folder / "metrics.csv").open() as file:
        return [
            {name: value for name, value in row.items() if is_number_of_training(name)}
            for row in csv.DictReader(file)
        ]


def summary(command, run):
    left_out = TIMES_OF_SUMMARY | PLACES
    return {name: value for name, value in command.summary(run).items() if name not in left_out}


def rows_of_wandb(folder, records, wait_for):
    """Return the numbers of all offline files together: step -> name -> value.

    wandb's own process writes them.
    """
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    wait_for(lambda: any(record.HasField("exit") for record in records(files[-1])))
    numbers = {}
    for record in (record for file in files for record in records(file)):
        if not record.HasField("history"):
            continue
        items = record.history.item
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        numbers.setdefault(row["trainer/step"], {}).update(
            (name, value)
            for name, value in row.items()
            if is_number_of_training(name)
            and not name.startswith("_")
            and isinstance(value, int | float)
        )
    return numbers


def rows_of_tensorboard(folder):
    """Return name -> step -> value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        name: {scalar.step: scalar.value for scalar in events.Scalars(name)}
        for name in events.Tags()["scalars"]
        if is_number_of_training(name)
    }


@pytest.fixture
def stops(command):
    """Return a function that gives the words and variables of a run with stops."""
    (command.folder / "stops.py").write_text(STOPS)

    def words(*plan):
        node = "+callbacks.stops"
        return [f"{node}._target_=stops.Stops", f"{node}.plan=[{','.join(map(repr, plan))}]"]

    return words


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_every_tracker_gets_the_numbers_of_a_run_that_never_stopped(
    command, stops, records, wait_for
):
    size = ["batch.global_size=12", "batch.micro_size=2", "trainer=cpu", "trainer.devices=3"]
    words = [*size, "logger=[wandb,tensorboard]", "log_every=4", "checkpoint.every=5"]
    place = {"PYTHONPATH": str(command.folder)}
    command.train(*words, "run_dir=whole")
    # All ranks save together two steps later, and start again from there: between two rows.
    plan = stops("7:1:SIGTERM")
    printed = command.train(*words, *plan, "run_dir=run", **place)
    assert printed.stderr.count("restarting all ranks") == 1
    whole = command.folder / "whole"
    run = command.folder / "run"
    assert rows(run) == rows(whole)
    assert summary(command, "run") == summary(command, "whole")
    assert rows_of_wandb(run, records, wait_for) == rows_of_wandb(whole, records, wait_for)
    assert rows_of_tensorboard(run) == rows_of_tensorboard(whole)


SLOW = """
import pathlib, time
from lightning.pytorch.loggers.logger import DummyLogger
class Slow(DummyLogger):
    def log_table(self, *_, **__): pass
    def log_html(self, *_): pass
    def next_commands(self): return []
    def close(self, status):
        time.sleep(2)
        with pathlib.Path("closed").open("a") as file:
            file.write(f"{status} ")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_tracker_is_closed_before_ranks_restart(command, stops):
    (command.folder / "slow.py").write_text(SLOW)
    size = ["batch.global_size=4", "batch.micro_size=2", "trainer=cpu", "trainer.devices=2"]
    words = [*size, "+logger.slow._target_=slow.Slow", *stops("7:1:SIGTERM"), "run_dir=run"]
    command.train(*words, PYTHONPATH=str(command.folder))
    assert (command.folder / "closed").read_text() == "stopped done "


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_fewer_ranks_log_the_same_bits_with_sums_in_one_order(command, stops):
    words = ["batch.exact_micro_size=2", "log_every=3", "checkpoint.every=4"]
    command.train(*words, "run_dir=whole")
    words.append("trainer=cpu")
    place = {"PYTHONPATH": str(command.folder)}
    plan = [*stops("5:3:SIGKILL", "9:0:SIGKILL"), "launch.max_restarts=0"]
    command.train(*words, "trainer.devices=4", *plan, "run_dir=run", status=1, **place)
    resume = ["train", "run_dir=run", "resume=auto"]
    command(*resume, "trainer.devices=2", status=1, **place)
    command(*resume, "trainer.devices=1", **place)
    assert rows(command.folder / "run") == rows(command.folder / "whole")


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(
    ("optimizer", "ranks", "kills"),
    [
        # Between two rows, after a validation, and after a save of it.
        ("adamw", 3, ["7:1:SIGKILL", "10:0:SIGKILL", "13:2:SIGKILL"]),
        ("muon", 2, ["7:1:SIGKILL"]),
    ],
    ids=["adamw", "muon"],
)
def test_a_restart_from_memory_changes_no_number(command, stops, optimizer, ranks, kills):
    size = ["batch.global_size=12", "batch.micro_size=2", "trainer=cpu"]
    words = [*size, f"trainer.devices={ranks}", "log_every=4", "checkpoint.every=10"]
    words += ["memory=5", "val_every=5", f"optim={optimizer}"]
    command.train(*words, "run_dir=whole")
    plan = stops(*kills)
    place = {"PYTHONPATH": str(command.folder)}
    printed = command.train(*words, *plan, "run_dir=run", **place)
    continued = re.findall(r"continues from step (\d+), kept in memory", printed.stdout)
    assert continued[0] == "5"
    assert set(continued) <= {"5", "10"}  # a kill may come before a state is complete
    whole = command.folder / "whole"
    run = command.folder / "run"
    assert rows(run) == rows(whole)
    assert summary(command, "run") == summary(command, "whole")
    assert command.summary("run")["weights"] == command.summary("whole")["weights"]
