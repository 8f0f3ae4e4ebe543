import csv
import shutil
from pathlib import Path

import pytest
import yaml

from lockstep.checkpoints.sums import sum_path
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory

pytest.importorskip("wandb", reason="wandb is not installed")
wandb_run = pytest.importorskip("lockstep.loggers.wandb_run")

ROOT = Path(__file__).parents[3]


def alerts(records, log):
    return [record.alert.title for record in records(log) if record.HasField("alert")]


def read_csv(folder):
    with (folder / "metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if value}
            for row in csv.DictReader(file)
        ]


def by_step(rows):
    """Join the rows of a step; drop repeats, wandb's additions, and non-numbers."""
    joined = {}
    for row in rows:
        values = {
            name: value for name, value in row.items() if not name.startswith(("_", "samples"))
        }
        joined.setdefault(values["trainer/step"], {}).update(values)
    return list(joined.values())


def test_two_ranks_make_one_offline_run_with_every_metric_of_the_csv(two, read_offline):
    folder = two[0].folder / "runs/two"
    ids, _, rows = read_offline(folder)
    assert ids == {(folder / "wandb/run_id").read_text()}
    assert ids == {two[0].summary("runs/two")["wandb_run_id"]}
    assert by_step(rows) == read_csv(folder)


def test_the_logged_configuration_is_complete_with_derived_values(two, read_offline):
    folder = two[0].folder / "runs/two"
    _, config, _ = read_offline(folder)
    frozen = RunDirectory(folder).values()
    assert {name: config[name] for name in frozen} == {**frozen, "run_name": "two"}
    derived = {"world_size": 2, "global_batch_size": 8, "peak_lr": 0.003}
    assert {name: config[name] for name in derived} == derived


def test_the_screen_shows_the_command_to_view_an_offline_run(two):
    (run,) = (two[0].folder / "runs/two/wandb").glob("offline-run-*")
    assert f"wandb sync runs/two/wandb/{run.name}" in two[1]
    assert f"wandb leet runs/two/wandb/{run.name}" in two[1]


@pytest.mark.slow
def test_resumed_run_keeps_its_id_and_secrets_stay_out_of_every_file(command, read_offline):
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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_failed_run_ends_as_failed_and_sends_an_alert(two, command, records):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_start(self, *_): raise ZeroDivisionError('on purpose')\n"
    )
    on_ranks = ("logger=wandb", "trainer=cpu")  # wandb keeps state for the lifetime of a process
    broken = ("+callbacks.broken._target_=broken.Broken", "run_dir=run", *on_ranks)
    command.train(*broken, status=1, PYTHONPATH=str(command.folder))
    for folder, status in ((command.folder / "run", 1), (two[0].folder / "runs/two", 0)):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        ends = [record.exit.exit_code for record in records(path) if record.HasField("exit")]
        assert ends == [status]
        assert [title.split()[-1] for title in alerts(records, path)] == ["failed"] * status


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_command_of_the_sweep_file_trains_two_ranks_under_the_agent_s_run_id(command, read_offline):
    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())
    drawn = [f"optim.lr={sweep['parameters']['optim.lr']['min']}", "optim.weight_decay=0.1"]
    assert sweep["command"][:3] == ["${env}", "lockstep-gpt", "train"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    words = [*sweep["command"][2:-1], *drawn, f"data.root={command.data_root}", "run_dir=run"]
    command(*words, WANDB_RUN_ID="agents1d")
    assert read_offline(command.folder / "run")[0] == {"agents1d"}
    assert command.summary("run")["world_size"] == 2
    assert sweep["metric"]["name"] in read_csv(command.folder / "run")[-1]


OF_SHELL = {
    "WANDB_PROJECT": "projectofshell",
    "WANDB_ENTITY": "entityofshell",
    "WANDB_NAME": "nameofshell",
    "WANDB_TAGS": "tagofshell,othertag",
    "WANDB_JOB_TYPE": "jobofshell",
    "WANDB_RUN_GROUP": "groupofshell",
    "WANDB_NOTES": "notesofshell",
}


def texts_in(folder):
    """Return all records of the offline runs in a folder, as one text."""
    return b"".join(path.read_bytes() for path in folder.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_wandb_s_variables_hold_where_nothing_is_set_and_the_project_stays(command):
    offline = ("logger=wandb", "trainer=cpu", "logger.wandb.mode=offline", "max_steps=2")
    command.train(*offline, "run_dir=run", **OF_SHELL)
    written = texts_in(command.folder / "run")
    values = [value for text in OF_SHELL.values() for value in text.split(",")]
    assert [value for value in values if value.encode() not in written] == []
    shutil.rmtree(command.folder / "run/wandb")
    command("train", "run_dir=run", "resume=auto", "max_steps=4")
    written = texts_in(command.folder / "run")
    assert b"projectofshell" in written
    assert b"entityofshell" in written

    typed = ["project=mine", "entity=ours", "tags=[typed]", "job_type=long", "group=set"]
    words = [f"logger.wandb.{word}" for word in typed]
    command.train(*offline, *words, "run_name=named", "run_dir=typed", **OF_SHELL)
    written = texts_in(command.folder / "typed")
    assert [value for value in values if value.encode() in written] == ["notesofshell"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_jobs_of_a_sweep_are_several_runs_whatever_the_variable_says(command, read_offline):
    offline = ("logger=wandb", "trainer=cpu", "logger.wandb.mode=offline", "max_steps=2")
    command.train("--multirun", *offline, "seed=1,2", "run_dir=sweep", WANDB_RUN_ID="fixed")
    ids = [read_offline(command.folder / f"sweep/{job}")[0] for job in (0, 1)]
    assert ids == [{"fixed-0"}, {"fixed-1"}]


@pytest.mark.slow
def test_an_id_that_wandb_rejects_is_the_variable_s_fault(command):
    offline = ("logger=wandb", "trainer=cpu", "logger.wandb.mode=offline")
    done = command.train(*offline, "run_dir=run", status=2, WANDB_RUN_ID="a/b:c")
    assert "WANDB_RUN_ID=a/b:c is rejected by wandb: Run ID cannot contain" in done.stderr
    assert done.stderr.endswith("; unset it\n")
    assert not (command.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_the_table_of_samples_grows_with_each_validation(command, read_offline):
    sampling = ("callbacks.sample.at_validation=true", "callbacks.sample.length=9", "val_every=5")
    on_ranks = ("logger=wandb", "trainer=cpu")  # in a process that has logged no other table
    command.train(*on_ranks, "run_dir=run", "max_steps=15", *sampling)
    _, _, rows = read_offline(command.folder / "run")
    tables = [row for row in rows if "samples.nrows" in row]
    assert [table["samples.increment_num"] for table in tables] == [0, 1, 2]
    assert (command.folder / "run/train.log").read_text().count("\nsample\n") == 3


LOG_CHECKPOINT = """
import sys
from pathlib import Path
import wandb
from lockstep.run.directory import RunDirectory
from lockstep.loggers.wandb_run import log_checkpoints
run = wandb.init(mode="offline", dir=".", settings=wandb.Settings(silent=True))
directory = RunDirectory(Path.cwd())
directory.write_summary(dict.fromkeys(["best_checkpoint", "last_checkpoint"], sys.argv[1]))
log_checkpoints(run, directory)
run.finish()
"""


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
        ({"mode": "maybe"}, r"logger\.wandb\.mode=maybe is not one of auto"),
        ({"tags": "first"}, r"logger\.wandb\.tags=first must be a list; write \[first\]"),
        ({"project": "a/b"}, r"^logger\.wandb\.project=a/b is rejected by wandb: Invalid project "),
        ({"log_model": True}, r"log_model=true uploads to wandb, but this run is offline"),
    ],
)
def test_impossible_settings_are_rejected_before_a_run_starts(tmp_path, settings, line):
    usual = {"project": "p", "mode": "offline"}
    with pytest.raises(UserError, match=line):
        wandb_run.WandbRun(
            directory=RunDirectory(tmp_path),
            config={"run_name": "run"},
            **{**usual, **settings},
        )
    assert not [*tmp_path.glob("wandb/*run-*")]


def test_a_torn_id_gives_way_to_a_new_one_that_stays(tmp_path):
    directory = RunDirectory(tmp_path)
    first = wandb_run.id_of(directory)
    assert wandb_run.id_of(directory) == first
    directory.wandb_id.write_bytes(b"")
    second = wandb_run.id_of(directory)
    assert second != first
    assert wandb_run.id_of(directory) == directory.wandb_id.read_text() == second


def test_a_run_keeps_its_id_under_the_variables_of_an_agent_s_other_run(
    tmp_path, monkeypatch, caplog
):
    directory = RunDirectory(tmp_path)
    for sweep, run in (("s1", "first"), ("s1", "second"), ("s1", None)):
        monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        if run is not None:
            monkeypatch.setenv("WANDB_RUN_ID", run)
        logged = wandb_run.WandbRun(
            directory=directory, config={"run_name": "run"}, project="p", mode="offline"
        )
        assert logged.experiment.id == directory.wandb_id.read_text() == "first"
        logged.experiment.finish()
        wandb_run.wandb.teardown()  # as at the end of a process: it has read the variables
    line = "this run is not of the sweep that WANDB_SWEEP_ID=s1 names: its wandb run is first"
    assert [message for message in caplog.messages if message.startswith("this run")] == [
        line,
        line,
    ]


def test_an_unknown_setting_is_one_line(command):
    refused = command.train("logger=wandb", "+logger.wandb.projekt=p", status=2)
    line = "logger.wandb.projekt=p is no argument of wandb.init; did you mean project?"
    assert refused.stderr.endswith(f": {line}\n")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("variable", "line"),
    [
        (None, r"^logger\.wandb\.mode=online is rejected .+, or set logger\.wandb\.mode=auto"),
        ("online", r"^WANDB_MODE=online is rejected .+, or set WANDB_MODE=offline"),
    ],
)
def test_without_a_login_the_place_of_the_mode_is_named(variable, line, monkeypatch):
    def refuse(**_):
        raise wandb_run.wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb_run.wandb, "init", refuse)  # whoever runs this may have a login
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    with pytest.raises(UserError, match=line):
        wandb_run.start_run("online", 1.0)
