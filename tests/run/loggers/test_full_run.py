import pytest

from lockstep_gpt.config import UserError
from lockstep_gpt.run.checkpoint import sum_path
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers import tracking


@pytest.mark.usefixtures("quick_ranks")
def test_the_table_of_samples_grows_with_each_validation(command, read_offline):
    sampling = ("callbacks.sample.at_validation=true", "callbacks.sample.length=9", "val_every=5")
    own = ("logger=wandb", "trainer=cpu")  # in a process that has logged no other table
    command.train(*own, "run_dir=run", "max_steps=15", *sampling)
    _, _, rows = read_offline(command.folder / "run")
    tables = [row for row in rows if "samples.nrows" in row]
    assert [table["samples.increment_num"] for table in tables] == [0, 1, 2]
    assert (command.folder / "run/train.log").read_text().count("\nsample\n") == 3


@pytest.mark.usefixtures("quick_ranks")
def test_histograms_and_code_are_logged_on_request(command, read_offline, records):
    store = command.folder / "store"
    asked = ("logger.wandb.watch=gradients", "logger.wandb.log_code=true")
    own = ("logger=wandb", "trainer=cpu")  # WANDB_DATA_DIR is read once per process
    command.train(*own, "run_dir=run", *asked, WANDB_DATA_DIR=str(store))
    _, _, rows = read_offline(command.folder / "run")
    names = {name for row in rows for name in row if name.startswith("gradients/")}
    assert any("blocks.0.attention" in name for name in names)
    (path,) = (command.folder / "run").glob("wandb/offline-run-*/*.wandb")
    kinds = {record.artifact.type for record in records(path) if record.HasField("artifact")}
    assert "code" in kinds
    metrics = {each.metric.name: each.metric for each in records(path) if each.HasField("metric")}
    assert metrics["val/loss"].summary.min
    assert metrics["optim/grad_norm"].summary.max


LOG_CHECKPOINT = """
import sys
from pathlib import Path
import wandb
from lockstep_gpt.run.loggers.full_run import FullRun
from lockstep_gpt.run.directory import RunDirectory
run = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
directory = RunDirectory(Path.cwd())
directory.write_summary(dict.fromkeys(["best_checkpoint", "last_checkpoint"], sys.argv[1]))
FullRun(run, directory).close("done")
"""


def alerts(records, log):
    return [record.alert.title for record in records(log) if record.HasField("alert")]


@pytest.mark.usefixtures("quick_ranks")
def test_a_run_that_fails_sends_an_alert(command, records):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_start(self, *_): raise ZeroDivisionError('on purpose')\n"
    )
    own = ("logger=wandb", "trainer=cpu")  # wandb keeps state for the lifetime of a process
    broken = ("+callbacks.broken._target_=broken.Broken", "run_dir=run", *own)
    command.train(*broken, status=1, PYTHONPATH=str(command.folder))
    (log,) = command.folder.glob("run/wandb/offline-run-*/*.wandb")
    assert [title.split()[-1] for title in alerts(records, log)] == ["failed"]


def test_the_best_and_the_last_checkpoint_become_an_artifact_with_aliases(
    command, records, python_of_forks
):
    path = command.folder / "step=000005.ckpt"
    path.write_bytes(b"weights")
    sum_path(path).write_text("sum")
    aliases = [path.stem, "best", "latest"]
    words = [python_of_forks, "-c", LOG_CHECKPOINT, str(path)]
    status, _, err = command.run_words(words)
    assert status == 0, err
    (log,) = command.folder.glob("wandb/offline-run-*/*.wandb")
    assert alerts(records, log) == []
    (artifact,) = [record.artifact for record in records(log) if record.HasField("artifact")]
    assert (artifact.type, sorted(artifact.aliases)) == ("model", sorted(aliases))
    assert {entry.path for entry in artifact.manifest.contents} == {path.name, sum_path(path).name}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"watch": "weights"}, r"logger\.wandb\.watch=weights is not one of null, gradients"),
        ({"log_model": True}, r"log_model=true uploads to wandb, but this run is offline"),
    ],
)
def test_impossible_settings_are_rejected(tmp_path, settings, line):
    usual = {"entity": None, "group": None, "tags": [], "job_type": "train", "notes": None}
    with pytest.raises(UserError, match=line):
        tracking.wandb_logger(
            directory=RunDirectory(tmp_path),
            config={},
            model=None,
            project="p",
            **{**usual, "mode": "offline", **settings},
        )
