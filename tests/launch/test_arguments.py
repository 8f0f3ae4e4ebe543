"""Command-line arguments that Hydra alone would reject."""

import pickle

import pytest
import yaml
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore

from lockstep_gpt import PROGRAM, cli
from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.launch.arguments import refuse_missing_values

SWEEP = ["optim.lr=1e-3,2e-3", "seed=range(4,6)", "max_steps=30"]


def choices(group):
    """Return the names of a group's choices, which may include yours, as an error lists them."""
    return ", ".join(sorted(yaml_files(group)))


@pytest.mark.parametrize("flags", [["--cfg", "job", "--multirun"], ["-m", "-c", "job"]])
def test_the_configuration_of_a_sweep_is_that_of_its_first_job(flags, capsys):
    assert cli.main(["train", *flags, *SWEEP]) == 0
    out, err = capsys.readouterr()
    config = yaml.safe_load(out)
    assert (config["optim"]["lr"], config["seed"], config["max_steps"]) == (1e-3, 4, 30)
    assert config["run_dir"].startswith("runs/sweep-") or "run_dir" not in flags
    assert err == "the first job of this sweep: optim.lr=0.001 seed=4\n"


@pytest.mark.parametrize(
    "words",
    [
        ["seed=3", "--cfg", "job", "max_steps=4"],
        ["--cfg=job", "seed=3", "--config-dir", "{}", "max_steps=4"],
        ["seed=3", "--multirun", "max_steps=4,5", "-c", "job"],
    ],
)
def test_flags_may_be_anywhere(words, tmp_path, capsys):
    assert cli.main(["train", *(word.format(tmp_path) for word in words)]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["seed"], config["max_steps"]) == (3, 4)


def test_callbacks_can_be_added_in_one_argument(capsys):
    usual, mine = {"progress", "sample"}, "mine:{_target_:lightning.Callback}"
    assert cli.main(["train", f"+callbacks={{{mine}}}", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["callbacks"].keys() >= {*usual, "mine"}


def test_an_interval_begins_at_its_start(capsys):
    assert cli.main(["train", "--cfg", "job", "-m", "optim.lr=interval(1e-4,1e-2)"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optim"]["lr"] == 1e-4


@pytest.mark.parametrize(
    ("word", "line"),
    [
        (
            "--devices=2",
            "--devices=2 is not a flag; settings are NAME=VALUE, without dashes; did you mean "
            "trainer.devices?",
        ),
        ("--zzz", "--zzz is not a flag; settings are NAME=VALUE, without dashes"),
        ("logger=null", f"logger=null is not one of {choices('logger')}"),
        (
            "experiment=configs/experiment/smoke.yaml",
            "experiment=configs/experiment/smoke.yaml: write the name alone, experiment=smoke",
        ),
        (
            "--trainer.max_epochs=3",
            "--trainer.max_epochs=3 is not a flag; settings are NAME=VALUE, without dashes; use "
            "max_steps or max_tokens",
        ),
        ("strategy=3", f"strategy=3 is not one of {choices('strategy')}"),
    ],
)
def test_long_errors_of_hydra_become_one_line(word, line, capsys):
    assert cli.main(["train", "logger=none", word]) == 2
    assert capsys.readouterr().err == f"{PROGRAM} train: {line}\n"


@pytest.mark.parametrize("launcher", ["joblib", "submitit_slurm", "submitit_local"])
def test_a_launcher_that_is_not_installed_is_one_line_with_the_command(launcher, capsys):
    assert cli.main(["train", "--multirun", f"hydra/launcher={launcher}", "seed=1,2"]) == 2
    line = capsys.readouterr().err
    package = f"hydra-{launcher.partition('_')[0]}-launcher"
    assert f"hydra/launcher={launcher} needs {package}, which is not installed; run: " in line
    assert line.count("\n") == 1


def test_a_job_that_failed_in_another_process_is_in_the_exit_status(capfd, tmp_path, monkeypatch):
    node = {"_target_": f"{BasicLauncher.__module__}.BasicLauncher"}
    ConfigStore.instance().store(group="hydra/launcher", name="elsewhere", node=node)
    launch = BasicLauncher.launch

    def launch_elsewhere(*args, **kwargs):  # results are copies, as from another process
        return [pickle.loads(pickle.dumps(result)) for result in launch(*args, **kwargs)]

    monkeypatch.setattr(BasicLauncher, "launch", launch_elsewhere)
    words = ["hydra/launcher=elsewhere", "optim.lr=-1,-2", f"run_dir={tmp_path}/sweep"]
    assert cli.main(["train", "--multirun", "experiment=smoke", *words]) == 2
    out, err = capfd.readouterr()
    for number, rate in enumerate(("-1.0", "-2.0")):
        assert f"job {number}: optim.lr={rate.partition('.')[0]}" in out
        assert err.count(f"optim.lr={rate} must be above 0") == 1
    assert "exit  val_loss" not in out  # of jobs in this process
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["hydra.run.dir", "hydra.sweep.dir"])
def test_a_folder_of_hydra_s_is_rejected_for_the_run_s(name, capsys):
    assert cli.main(["train", f"{name}=elsewhere"]) == 2
    line = f"{PROGRAM} train: {name}=elsewhere has no effect here; set run_dir=elsewhere\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("word", ["hydra.job.chdir=true", "hydra.output_subdir=settings"])
def test_where_hydra_would_work_or_write_is_rejected(word, capsys):
    assert cli.main(["train", word]) == 2
    line = f"{word} has no effect here; all files of a run are in its run_dir"
    assert capsys.readouterr().err == f"{PROGRAM} train: {line}\n"


def test_a_command_without_words_has_no_flag_without_a_value():
    refuse_missing_values([])
    refuse_missing_values(["seed=1", "-c", "job", "-p", "optim"])
