"""`logger=mlflow` with a real MLflow, whose store is a database next to the run."""

import csv

import pytest

from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.mlflow_runs import MLflowRun

# From libraries that MLflow uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def client(command):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{command.folder}/mlflow.db")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A database; making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


def the_run(client):
    (experiment,) = client.search_experiments(filter_string="name = 'lockstep-gpt'")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def history(client, run, name):
    return [
        (metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)
    ]


def test_mlflow_has_the_settings_and_metrics_of_a_resumed_run(command, client):
    command.train("logger=mlflow", "+logger.mlflow.tags.team=a", "run_dir=run", "run_name=mine")
    run = the_run(client)
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("mine", "FINISHED", "a")
    assert run.data.params["optim/lr"] == "0.003"
    assert run.data.params["parameters"] == "34688"
    command("train", "run_dir=run", "resume=auto", "max_steps=30", "launch.inline=true")
    run = the_run(client)
    assert run.info.status == "FINISHED"
    with (command.folder / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("train/loss", "val/loss"):
        logged = [(int(row["trainer/step"]), float(row[name])) for row in rows if row[name]]
        assert history(client, run, name) == logged
        assert logged[-1][0] == 30


def test_a_new_database_leaves_the_lines_of_the_run_alone(command):
    ended = command.train("logger=mlflow", "run_dir=run", "max_steps=10")
    for printed in (ended.stdout + ended.stderr, (command.folder / "run/train.log").read_text()):
        assert "step 10/10" in printed
        assert "done in" in printed


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", "0" * 32])  # a torn file; a run that was deleted
def test_an_id_that_leads_nowhere_gives_way_to_a_new_run(tmp_path, store, monkeypatch, damage):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)  # MLflow sets it, also for later tests

    def start():
        config = {"run_name": "mine"}
        settings = {"experiment": "e", "tracking_uri": store, "tags": {}}
        return MLflowRun(directory=RunDirectory(tmp_path), config=config, **settings).run_id

    first = start()
    assert start() == first
    (tmp_path / "mlflow_run_id").write_text(damage)
    second = start()
    assert second not in (first, damage)
    assert start() == second


def test_a_failed_run_is_marked_as_failed(command, client):
    command.train("logger=mlflow", "run_dir=run", "optim.lr=1e30", "optim.clip_norm=null", status=1)
    assert the_run(client).info.status == "FAILED"


def test_an_error_of_mlflow_becomes_one_line(command):
    refused = command.train("logger=mlflow", "logger.mlflow.tracking_uri=nope://x", status=2)
    assert "logger.mlflow.tracking_uri=nope://x is rejected by MLflow: " in refused.stderr
    assert "Traceback" not in refused.stderr
