import csv
from pathlib import Path

import pytest
import yaml

from lockstep_gpt.config import UserError
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers import tracking


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
        kept = {name: value for name, value in row.items() if not name.startswith(("_", "samples"))}
        joined.setdefault(kept["trainer/step"], {}).update(kept)
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
    frozen = yaml.safe_load((folder / "config.yaml").read_text())
    assert {name: config[name] for name in frozen} == frozen
    derived = {"world_size": 2, "global_batch_size": 8, "tokens_per_step": 256, "scaled_lr": 0.003}
    assert {name: config[name] for name in derived} == derived
    assert config["parameters"] == 34688


def test_the_screen_shows_the_command_to_view_an_offline_run(two):
    (run,) = (two[0].folder / "runs/two/wandb").glob("offline-run-*")
    assert f"wandb sync runs/two/wandb/{run.name}" in two[1]
    assert f"wandb leet runs/two/wandb/{run.name}" in two[1]


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


@pytest.mark.usefixtures("quick_ranks")
def test_failed_run_is_ended_as_failed_and_a_finished_one_as_finished(two, command, records):
    (command.folder / "broken.py").write_text(
        "import lightning\n"
        "class Broken(lightning.Callback):\n"
        "    def on_train_start(self, *_): raise ZeroDivisionError('on purpose')\n"
    )
    own = ("logger=wandb", "trainer=cpu")  # wandb keeps state for the lifetime of a process
    broken = ("+callbacks.broken._target_=broken.Broken", "run_dir=run", *own)
    command.train(*broken, status=1, PYTHONPATH=str(command.folder))
    for folder, status in ((command.folder / "run", 1), (two[0].folder / "runs/two", 0)):
        (path,) = folder.glob("wandb/offline-run-*/*.wandb")
        ends = [record.exit.exit_code for record in records(path) if record.HasField("exit")]
        assert ends == [status]


@pytest.mark.usefixtures("quick_ranks")
def test_command_of_the_sweep_file_trains_two_ranks_under_the_agent_s_run_id(command, read_offline):
    sweep = yaml.safe_load((Path(__file__).parents[2] / "configs/sweep.yaml").read_text())
    drawn = [f"optim.lr={sweep['parameters']['optim.lr']['min']}", "optim.weight_decay=0.1"]
    assert sweep["command"][:3] == ["${env}", "lockstep-gpt", "train"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    words = [*sweep["command"][2:-1], *drawn, f"data.root={command.data_root}", "run_dir=run"]
    command(*words, WANDB_RUN_ID="agents1d")
    assert read_offline(command.folder / "run")[0] == {"agents1d"}
    assert command.summary("run")["world_size"] == 2
    assert sweep["metric"]["name"] in read_csv(command.folder / "run")[-1]


def test_an_unknown_mode_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"logger\.wandb\.mode=maybe is not one of auto"):
        tracking.wandb_logger(
            directory=RunDirectory(tmp_path), config={}, model=None, mode="maybe", project="p"
        )


@pytest.mark.usefixtures("quick_ranks")
def test_a_setting_that_is_off_does_not_need_its_extra(command):
    own = ("logger=wandb", "trainer=cpu", "+logger.wandb.of_an_extra=null")
    command.train(*own, "run_dir=run", "max_steps=10")
    assert len(list((command.folder / "run/wandb").glob("offline-run-*"))) == 1
