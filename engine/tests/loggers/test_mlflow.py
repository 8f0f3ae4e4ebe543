"""`logger=mlflow` with a real MLflow, whose store is a database next to the run."""

import csv
import shutil

import pytest

# From libraries that MLflow uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def no_other_store(monkeypatch):
    """Undo what MLflow sets for its whole process."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory):
    """A database without runs; making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def uri(command, empty_store):
    """The absolute path of an empty database: MLflow keeps one open for each path it has seen."""
    path = shutil.copy(empty_store, command.folder / "mlflow.db")
    return f"sqlite:///{path}"


@pytest.fixture
def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def runs_of(client):
    (experiment,) = client.search_experiments(filter_string="name = 'lockstep'")
    return client.search_runs([experiment.experiment_id])


def the_run(client):
    (run,) = runs_of(client)
    return run


def history(client, run, name):
    """Return each (step, value); the counters of a step come with each of its rows."""
    metrics = client.get_metric_history(run.info.run_id, name)
    return sorted({(metric.step, metric.value) for metric in metrics})


@pytest.mark.slow
def test_mlflow_has_the_settings_and_every_row_of_a_resumed_run(command, client, uri):
    words = (f"logger.mlflow.tracking_uri={uri}", "+logger.mlflow.tags.team=a")
    command.train("logger=mlflow", *words, "run_dir=run", "run_name=mine")
    run = the_run(client)
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("mine", "FINISHED", "a")
    assert run.data.params["optim/lr"] == "0.003"
    assert run.data.params["peak_lr"] == "0.003"
    command("train", "run_dir=run", "resume=auto", "max_steps=30", "launch.inline=true")
    run = the_run(client)
    assert run.info.status == "FINISHED"
    assert run.data.params["max_steps"] != "30"  # MLflow keeps a run's first values
    with (command.folder / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[-1]["trainer/step"] == "30"
    for name in rows[0]:
        # Lightning counts steps from 0.
        written = [(int(row["trainer/step"]) - 1, float(row[name])) for row in rows if row[name]]
        assert history(client, run, name) == ([] if name == "trainer/step" else written), name


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_the_default_is_a_new_database_which_leaves_the_lines_of_the_run_alone(command):
    ended = command.train("logger=mlflow", "trainer=cpu", "run_dir=run", "max_steps=10")
    assert (command.folder / "mlflow.db").exists()
    assert (command.folder / "run/mlflow_run_id").exists()
    for printed in (ended.stdout + ended.stderr, (command.folder / "run/train.log").read_text()):
        assert "step 10/10" in printed
        assert "done in" in printed


@pytest.mark.slow
def test_an_id_that_leads_nowhere_is_a_warning_and_without_one_a_run_begins(command, client, uri):
    words = ("run_dir=run", "logger=mlflow", f"logger.mlflow.tracking_uri={uri}")
    command.train(*words, "max_steps=10")
    file = command.folder / "run/mlflow_run_id"
    assert file.read_text() == the_run(client).info.run_id
    file.write_text("0" * 32)
    command.train(*words, "resume=auto", "max_steps=20")
    log = (command.folder / "run/train.log").read_text()
    assert "mlflow no longer records this run" in log
    assert command.summary("run")["status"] == "done"
    assert len(runs_of(client)) == 1
    file.unlink()
    command.train(*words, "resume=auto", "max_steps=30")
    assert {run.info.status for run in runs_of(client)} == {"FINISHED"}
    assert file.read_text() in {run.info.run_id for run in runs_of(client)}
    assert len(runs_of(client)) == 2


def test_a_failed_run_is_marked_as_failed(command, client, uri):
    words = ("logger=mlflow", f"logger.mlflow.tracking_uri={uri}", "run_dir=run")
    command.train(*words, "optim.lr=1e30", "clip_norm=null", status=1)
    assert the_run(client).info.status == "FAILED"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["nope://x", "http://127.0.0.1:9"])
def test_a_server_that_is_not_there_is_one_warning(command, wrong):
    ended = command.train(
        "logger=mlflow", f"logger.mlflow.tracking_uri={wrong}", "run_dir=run", "max_steps=10"
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("mlflow ")]
    assert line.endswith("run/metrics.csv has every row")
    assert "Traceback" not in ended.stdout + ended.stderr
    assert command.summary("run")["status"] == "done"
