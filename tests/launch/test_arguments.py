"""Command-line arguments that Hydra alone would reject."""

import pickle

import pytest
import yaml
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore

from lockstep_gpt import PROGRAM, cli


@pytest.mark.parametrize(
    "words",
    [
        ["seed=3", "--cfg", "job", "max_steps=4"],
        ["--cfg=job", "seed=3", "--config-dir", "{}", "max_steps=4"],
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
    line = f"{name}=elsewhere has no effect here; all files of a run are in its run_dir"
    assert capsys.readouterr().err == f"{PROGRAM} train: {line}\n"


@pytest.mark.parametrize("word", ["hydra.job.chdir=true", "hydra.output_subdir=settings"])
def test_where_hydra_would_work_or_write_is_rejected(word, capsys):
    assert cli.main(["train", word]) == 2
    line = f"{word} has no effect here; all files of a run are in its run_dir"
    assert capsys.readouterr().err == f"{PROGRAM} train: {line}\n"
