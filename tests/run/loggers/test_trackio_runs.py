"""`logger=trackio` with a real trackio, which keeps its runs in the folder of the test."""

import contextlib
import csv
import json
import sqlite3

import pytest

from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.trackio_runs import TrackioRun


@pytest.fixture
def train(command):
    """Return a function that trains with trackio, without a network."""

    def run(*overrides, **options):
        return command.train("logger=trackio", *overrides, HF_HUB_OFFLINE="1", **options)

    return run


@pytest.fixture
def read(command):
    """Return a function that reads columns of a table of the project's database, row by row."""

    def rows(columns, table):
        file = command.folder / "trackio/lockstep-gpt.db"
        with contextlib.closing(sqlite3.connect(file)) as database:
            return database.execute(f"SELECT {columns} FROM {table} ORDER BY id").fetchall()

    return rows


def logged(read):
    """Return (step, metrics) of each row that trackio has."""
    return [(step, json.loads(metrics)) for step, metrics in read("step, metrics", "metrics")]


def history(read, name):
    return [(step, metrics[name]) for step, metrics in logged(read) if name in metrics]


def test_trackio_has_the_settings_and_metrics_of_a_resumed_run(command, train, read):
    ended = train("run_dir=run", "run_name=mine", "max_steps=10")
    assert 'trackio show --project "lockstep-gpt"' in ended.stdout
    assert "Trackio" not in ended.stdout  # it prints nothing itself
    assert history(read, "status") == [(10, "done")]
    train("run_dir=run", "resume=auto", "max_steps=20")
    with (command.folder / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "val/loss"):
        assert history(read, name) == [
            (int(row["trainer/step"]), float(row[name])) for row in rows if row[name]
        ]
    assert history(read, "status") == [(10, "done"), (20, "done")]
    assert [step for step, _ in history(read, "samples")] == [10, 20]
    assert len(set(read("run_id", "metrics"))) == 1
    assert set(read("run_name", "metrics")) == {("mine",)}
    ((config,),) = read("config", "configs")
    assert json.loads(config)["max_steps"] == 20
    assert json.loads(config)["parameters"] == 34688
    assert read("title", "alerts") == []


def test_a_second_run_with_the_same_name_is_another_run(train, read):
    for folder in ("a", "b"):
        train(f"run_dir={folder}", "run_name=mine", "max_steps=10")
    train("run_dir=a", "run_name=mine", "resume=auto", "max_steps=20")
    first, second, third = (
        (name, run_id)
        for name, run_id, metrics in read("run_name, run_id, metrics", "metrics")
        if "status" in json.loads(metrics)
    )
    assert first == third == ("mine", first[1])
    assert second[0].startswith("mine-")
    assert second[1] != first[1]


@pytest.mark.usefixtures("fresh_trackio")
def test_a_torn_name_gives_way_to_that_of_a_new_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start():
        config = {"run_name": "mine"}
        run = TrackioRun(directory=RunDirectory(tmp_path), config=config, project="p", group=None)
        run.close("done")
        return run.version

    assert start() == start() == "mine"
    (tmp_path / "trackio_run").write_text("")
    second = start()
    assert second.startswith("mine-")
    assert start() == second


def test_a_failed_run_is_marked_as_failed_and_sends_an_alert(command, train, read):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_start(self, *_): raise ZeroDivisionError('on purpose')\n"
    )
    broken = ("+callbacks.broken._target_=broken.Broken", "run_dir=run", "run_name=mine")
    train(*broken, status=1, PYTHONPATH=str(command.folder))
    assert history(read, "status") == [(0, "failed")]
    assert read("title, level", "alerts") == [("mine failed", "error")]


def test_a_page_is_kept_with_the_run(command, train, read):
    (command.folder / "page.py").write_text(
        "import lightning\n"
        "from lockstep_gpt.run.loggers.tracking import tracked_runs\n"
        "class Page(lightning.Callback):\n"
        "    def on_train_start(self, trainer, module):\n"
        "        (run,) = tracked_runs(trainer.loggers)\n"
        "        run.log_html('page', '<b>our own</b>', 3)\n"
    )
    words = ("+callbacks.page._target_=page.Page", "run_dir=run", "max_steps=10")
    train(*words, PYTHONPATH=str(command.folder))
    ((step, page),) = history(read, "page")
    assert step == 3
    (file,) = (command.folder / "trackio").rglob("*.html")
    assert file.read_text() == "<b>our own</b>"
    assert file.name in json.dumps(page)


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_in_one_group(train, read):
    train("--multirun", "run_dir=sweep", "max_steps=10", "seed=1,2")
    groups = [json.loads(config)["_Group"] for (config,) in read("config", "configs")]
    assert groups == ["sweep", "sweep"]


def test_a_project_that_trackio_rejects_is_one_line(train):
    refused = train("run_dir=run", "logger.trackio.project=registry-x", status=2)
    assert "logger.trackio.project=registry-x is rejected by trackio: " in refused.stderr
    assert "Traceback" not in refused.stderr
