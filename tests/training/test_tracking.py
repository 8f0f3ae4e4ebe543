import csv
import json
import struct
from pathlib import Path

import pytest
import yaml
from wandb.proto import wandb_internal_pb2

from lockstep_gpt.config import UserError
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training import tracking
from lockstep_gpt.training.checkpoint import sum_path

BLOCK, HEADER = 32768, 7


def records(path):
    """Read a `.wandb` file: LevelDB's log format after 7 bytes, a protobuf in each record."""
    content, position, parts = path.read_bytes(), HEADER, []
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER
        parts.append(content[position : position + length])
        position += length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []


def read_offline(folder):
    """Return the ids of runs, the configuration and the rows of all offline files below."""
    ids, config, rows = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                update = record.run.config.update
                config.update({item.key: json.loads(item.value_json) for item in update})
            elif record.HasField("history"):
                items = record.history.item
                rows.append(
                    {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                )
    return ids, config, rows


def read_csv(folder):
    with (folder / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def by_step(rows):
    """Join the rows of a step; drop repeats, what wandb adds, and what is no number."""
    joined = {}
    for row in rows:
        kept = {name: value for name, value in row.items() if not name.startswith(("_", "samples"))}
        joined.setdefault(kept["trainer/step"], {}).update(kept)
    return list(joined.values())


def test_two_ranks_make_one_offline_run_with_every_metric_of_the_csv(two):
    folder = two[0].folder / "runs/two"
    ids, _, rows = read_offline(folder)
    assert ids == {(folder / "wandb/run_id").read_text()}
    assert ids == {two[0].summary("runs/two")["wandb_run_id"]}
    assert by_step(rows) == read_csv(folder)


def test_configuration_is_whole_and_says_what_was_derived(two):
    folder = two[0].folder / "runs/two"
    _, config, _ = read_offline(folder)
    frozen = yaml.safe_load((folder / "config.yaml").read_text())
    assert {name: config[name] for name in frozen} == frozen
    derived = {"world_size": 2, "global_batch_size": 8, "tokens_per_step": 256, "scaled_lr": 0.003}
    assert {name: config[name] for name in derived} == derived
    assert config["parameters"] == 34688


def test_screen_says_how_to_look_at_an_offline_run(two):
    (run,) = (two[0].folder / "runs/two/wandb").glob("offline-run-*")
    assert f"wandb sync runs/two/wandb/{run.name}" in two[1]
    assert f"wandb leet runs/two/wandb/{run.name}" in two[1]


def test_resumed_run_keeps_its_id_and_secrets_stay_out_of_every_file(command):
    canary = "canary-5fe1c0de-canary-5fe1c0de-canary-5fe1c0de"
    secret = {"WANDB_API_KEY": canary, "HF_TOKEN": canary, "MY_SECRET": canary}
    command.train("logger=wandb", "run_dir=run", "max_steps=10", **secret)
    command("train", "run_dir=run", "resume=auto", "max_steps=20", **secret)
    ids, _, rows = read_offline(command.folder / "run")
    assert len(ids) == 1
    assert len(list((command.folder / "run/wandb").glob("offline-run-*"))) == 2
    assert by_step(rows) == read_csv(command.folder / "run")
    files = [path for path in (command.folder / "run").rglob("*") if path.is_file()]
    assert [path for path in files if canary.encode() in path.read_bytes()] == []


@pytest.mark.usefixtures("quick_ranks")
def test_failed_run_is_ended_as_failed_and_a_finished_one_as_finished(two, command):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_start(self, *_): raise ZeroDivisionError('on purpose')\n"
    )
    own = ("logger=wandb", "trainer=cpu")  # wandb keeps state for the life of a process
    broken = ("+callbacks.broken._target_=broken.Broken", "run_dir=run", *own)
    command.train(*broken, status=1, PYTHONPATH=str(command.folder))
    for folder, status in ((command.folder / "run", 1), (two[0].folder / "runs/two", 0)):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        ends = [record.exit.exit_code for record in records(path) if record.HasField("exit")]
        assert ends == [status]
        alerts = [record.alert.title for record in records(path) if record.HasField("alert")]
        assert [title.split()[-1] for title in alerts] == ["failed"] * status


@pytest.mark.usefixtures("quick_ranks")
def test_the_table_of_samples_grows_with_each_validation(command):
    sampling = ("callbacks.sample.at_validation=true", "callbacks.sample.length=9", "val_every=5")
    own = ("logger=wandb", "trainer=cpu")  # in a process that has logged no other table
    command.train(*own, "run_dir=run", "max_steps=15", *sampling)
    _, _, rows = read_offline(command.folder / "run")
    tables = [row for row in rows if "samples.nrows" in row]
    assert [table["samples.increment_num"] for table in tables] == [0, 1, 2]
    assert (command.folder / "run/train.log").read_text().count("\nsample\n") == 3


@pytest.mark.usefixtures("quick_ranks")
def test_histograms_and_code_are_kept_where_they_are_asked_for(command):
    store = command.folder / "store"
    asked = ("logger.wandb.watch=gradients", "logger.wandb.log_code=true")
    own = ("logger=wandb", "trainer=cpu")  # WANDB_DATA_DIR is read once in a process
    command.train(*own, "run_dir=run", *asked, WANDB_DATA_DIR=str(store))
    _, _, rows = read_offline(command.folder / "run")
    names = {name for row in rows for name in row if name.startswith("gradients/")}
    assert any("blocks.0.attention" in name for name in names)
    (path,) = (command.folder / "run").glob("wandb/offline-run-*/*.wandb")
    kinds = {record.artifact.type for record in records(path) if record.HasField("artifact")}
    assert "code" in kinds


LOG_CHECKPOINT = """
import json, sys
from pathlib import Path
import wandb
from lockstep_gpt.training.tracking import TrackedRun
run = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
aliases = json.loads(sys.argv[2])
TrackedRun(run, keep_checkpoints=True).close("done", {Path(sys.argv[1]): aliases})
"""


def test_the_best_and_the_last_checkpoint_become_an_artifact_with_aliases(command, python_of_forks):
    path = command.folder / "step=000005.ckpt"
    path.write_bytes(b"weights")
    sum_path(path).write_text("sum")
    aliases = [path.stem, "best", "latest"]
    words = [python_of_forks, "-c", LOG_CHECKPOINT, str(path), json.dumps(aliases)]
    status, _, err = command.run_words(words)
    assert status == 0, err
    (log,) = command.folder.glob("wandb/offline-run-*/*.wandb")
    (artifact,) = [record.artifact for record in records(log) if record.HasField("artifact")]
    assert (artifact.type, sorted(artifact.aliases)) == ("model", sorted(aliases))
    assert {entry.path for entry in artifact.manifest.contents} == {path.name, sum_path(path).name}


@pytest.mark.usefixtures("quick_ranks")
def test_command_of_the_sweep_file_trains_two_ranks_under_the_agent_s_run_id(command):
    sweep = yaml.safe_load((Path(__file__).parents[2] / "configs/sweep.yaml").read_text())
    drawn = [f"optim.lr={sweep['parameters']['optim.lr']['min']}", "optim.weight_decay=0.1"]
    assert sweep["command"][:3] == ["${env}", "lockstep-gpt", "train"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    words = [*sweep["command"][2:-1], *drawn, f"data.root={command.data_root}", "run_dir=run"]
    command(*words, WANDB_RUN_ID="agents1d")
    assert read_offline(command.folder / "run")[0] == {"agents1d"}
    assert command.summary("run")["world_size"] == 2
    assert sweep["metric"]["name"] in read_csv(command.folder / "run")[-1]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"mode": "maybe"}, r"logger\.wandb\.mode=maybe is not one of auto"),
        ({"watch": "weights"}, r"logger\.wandb\.watch=weights is not one of null, gradients"),
        ({"log_model": True}, r"log_model=true goes to wandb's server, and this run is offline"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, settings, line):
    usual = {"entity": None, "group": None, "tags": [], "job_type": "train", "notes": None}
    with pytest.raises(UserError, match=line):
        tracking.wandb_logger(
            directory=RunDirectory(tmp_path),
            config={},
            project="p",
            **{**usual, "mode": "offline", **settings},
        )


def test_tensorboard_holds_the_same_names(command):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command.train("logger=tensorboard", "run_dir=run")
    events = EventAccumulator(str(command.folder / "run/tensorboard")).Reload()
    rows = read_csv(command.folder / "run")
    losses = [scalar.value for scalar in events.Scalars("val/loss")]
    assert losses == pytest.approx([row["val/loss"] for row in rows if "val/loss" in row])
    assert set(rows[-1]) - {"trainer/step"} <= set(events.Tags()["scalars"])
