"""Mistakes of people who know Hydra, Lightning, and torchrun, but not this project."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep_gpt
from lockstep_gpt import PROGRAM, cli
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.refused_callbacks import refuse_what_cannot_work
from lockstep_gpt.training.building import build

PACKAGE = Path(lockstep_gpt.__file__).parent
SPACES = "options are --NAME VALUE, and a text with spaces needs quotes; usage: "


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("trainer.gpus=2", "trainer.gpus=2 cannot be set there; set trainer.devices instead"),
        ("+trainer.gpus=2", "trainer.gpus=2 cannot be set there; set trainer.devices instead"),
        (
            "--config-name smoke",
            "--config-name=smoke: this names a file that replaces configs/train.yaml; for a "
            "recipe, set experiment=smoke",
        ),
        ("--config-path=confs", "--config-path must be the absolute path of a folder that "),
        ("-cp /no/such/folder", "--config-path must be the absolute path of a folder that "),
        (
            "-n_layer 3",
            "-n_layer is not a flag; settings are NAME=VALUE, without dashes; did you mean "
            "model.n_layer?\n",
        ),
        ("-run_dir x", "-run_dir is not a flag; settings are NAME=VALUE, without dashes; did you "),
        ("resume=", "resume= is not none, auto, or a path; to continue a run, set run_dir=RUN "),
        (
            "data.path=~/books",
            "data.path=~/books: shells replace ~ only before a word; write data.path=$HOME/books",
        ),
        (
            "-m optim.lr=1e-3, 3e-3",
            "optim.lr=1e-3, ends with a comma; write values without spaces, as in optim.lr=A,B",
        ),
        ("logger.project=x", "unknown setting logger.project; did you mean logger.wandb.project"),
        (
            "+logger.project=x",
            "logger.project has no _target_, which names its class; to set project of one that "
            "is chosen, write logger.CHOICE.project, else set logger.project._target_",
        ),
        (
            "callbacks=early_stopping",
            "callbacks=early_stopping is not one of ",
        ),
        (
            "callbacks.early_stopping.patience=3",
            "unknown setting callbacks.early_stopping; use +callbacks.stop._target_=lightning",
        ),
        (
            "logger.wandb.offline=true",
            "unknown setting logger.wandb.offline; use logger.wandb.mode=offline",
        ),
        ("max_steps=1e3", "max_steps=1e3 must be a whole number; write 1000"),
        ("max_steps=1.5", "max_steps=1.5 must be a whole number\n"),
        (
            "batch.exact_micro_size=None",
            "batch.exact_micro_size=None must be a whole number; nothing is written null",
        ),
        (
            "data=text data.path=a.txt,b.txt",
            "data.path=a.txt,b.txt has several values: add --multirun to run each, or write one "
            "folder or one glob",
        ),
        ("callbacks.sample=off", "callbacks.sample=off is not a class; to leave it out, set "),
        ("logger.wandb=false", "logger.wandb=False is not a class; to leave it out, set logger."),
        ("=", "= has no name; write NAME=VALUE, without spaces, as in seed=1\n"),
        ("=3", "=3 has no name; write NAME=VALUE, without spaces, as in seed=1\n"),
        ("-c", "-c needs one of job, hydra, all; write -c job\n"),
        ("--cfg seed=1", "--cfg needs one of job, hydra, all; write --cfg job\n"),
        ("-cd", "-cd needs a value; write -cd FOLDER\n"),
        ("-p -c job", "-p needs a value; write -p optim\n"),
        ("--split test", "--split is not a flag of train; to test at the end, set test=true; aft"),
        ("--config x.yaml", "--config is not a flag of train; choose configs/experiment/NAME.yaml"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(words, line, capsys):
    assert cli.main(["train", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{PROGRAM} train: {line}"), err
    assert err.count("\n") == 1


def test_a_sweep_does_not_go_into_the_folder_of_a_run(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}")
    for words in (["-m", "seed=1,2"], ["--multirun", "resume=auto"]):
        assert cli.main(["train", f"run_dir={run}", *words]) == 2
        err = capsys.readouterr().err
        line = f"run_dir={run} is a run, but with --multirun, run_dir is a folder of runs"
        assert err.startswith(f"{PROGRAM} train: {line}"), err
        assert err.count("\n") == 1
    assert [path.name for path in run.iterdir()] == ["config.yaml"]


def test_an_unknown_callback_or_logger_says_how_to_name_a_class_of_lightning_s(capsys):
    for group in ("callbacks", "logger"):
        assert cli.main(["train", f"{group}=zzz"]) == 2
        package = f"lightning.pytorch.{group.removesuffix('s')}s"
        remedy = f"; for a class of Lightning's, write +{group}.NAME._target_={package}.CLASS\n"
        assert capsys.readouterr().err.endswith(remedy)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "the following arguments are required: source; usage: "),
        (["generate", "run", "def f"], f"unrecognized arguments: def f; {SPACES}"),
        (["evaluate", "run", "data.path=x"], f"unrecognized arguments: data.path=x; {SPACES}"),
    ],
)
def test_a_wrong_word_for_a_trained_model_is_one_line_with_the_usage(words, message, capsys):
    assert cli.main(words) == 2
    line = f"{PROGRAM} {words[0]}: {message}{PROGRAM} {words[0]} [-h]"
    err = capsys.readouterr().err
    assert err.startswith(line), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "--run_dir", "runs/one"],
        ["evaluate", "--run_dir=runs/one"],
        ["generate", "--out_dir=runs/one"],
    ],
)
def test_the_run_as_an_option_is_answered_with_how_to_name_it(words, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    name = words[1].partition("=")[0]
    assert err.endswith(f"; here, {name}: write the run directory without a name\n"), err


def test_a_callback_may_monitor_a_metric_of_the_user_s_named_like_ours(caplog):
    stop = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss"}
    refuse_what_cannot_work(SimpleNamespace(callbacks={"stop": stop}))
    assert "callbacks.stop.monitor=val_loss: ours is val/loss; unless your" in caplog.text
    caplog.clear()
    refuse_what_cannot_work(SimpleNamespace(callbacks={"stop": {**stop, "monitor": "val/loss"}}))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("monitor", "near"), [("val/los", "val/loss"), ("loss", "val/loss"), ("tokens", None)]
)
def test_a_metric_with_nearly_the_name_of_ours_is_asked_about(monitor, near, caplog):
    best = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "monitor": monitor}
    refuse_what_cannot_work(SimpleNamespace(callbacks={"best": best}))
    expected = f"callbacks.best.monitor={monitor}: ours is {near}; unless" if near else ""
    assert caplog.text.count("ours is") == (near is not None)
    assert expected in caplog.text


def test_early_stopping_without_a_metric_is_answered_before_ranks_start(capsys):
    target = "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    assert cli.main(["train", "experiment=smoke", target]) == 2
    assert capsys.readouterr().err.startswith(
        f"{PROGRAM} train: callbacks.stop: Lightning's EarlyStopping lacks a metric; set "
        "+callbacks.stop.monitor=val/loss, or another one: train/loss, val/loss, "
    )


def test_nanogpt_s_options_of_generate_are_answered_with_ours(capsys):
    words = ["--num_samples=3", "--max_new_tokens=100", "--start=The", "--temperature=0.7"]
    assert cli.main(["generate", "run", *words]) == 2
    assert capsys.readouterr().err == (
        f"{PROGRAM} generate: unrecognized arguments: --num_samples=3 --max_new_tokens=100 "
        "--start=The; here, --num_samples: call it once for each text, with another --seed; "
        "--max_new_tokens: write --length; --start: write --prompt\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", ["cli.py", "training/train.py"])
def test_a_file_of_the_package_is_not_a_program_that_silently_does_nothing(file):
    done = subprocess.run(
        [sys.executable, PACKAGE / file, "train"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{PACKAGE / file} is not a program; run: ")
    assert done.stderr.endswith(" train\n")


@pytest.mark.slow
def test_under_torchrun_a_file_of_the_package_is_answered_with_torchrun_s_command(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1"),
            *(PACKAGE / "cli.py", "train"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    command = "torchrun ... -m lockstep_gpt train"
    line = f"{PACKAGE / 'cli.py'} is not a program; run: {command}\n"
    assert done.stderr.startswith(line), done.stderr
    assert line in done.stderr.partition("Root Cause")[2]


def test_a_class_that_cannot_be_imported_is_named_once(capfd):
    target = "lightning.pytorch.callbacks.EarlyStoping"
    with pytest.raises(UserError, match=f"^_target_={target} can't be imported; correct it"):
        build({"_target_": target}, {})
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_torchrun_repeats_a_mistake_as_the_cause(command):
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "lockstep_gpt"]
    process = command.start_python(*words, *command.smoke("trainer=cpu", "batch.global_size=7"))
    _, err = process.communicate(timeout=240)
    cause = err.partition("Root Cause")[2]
    assert f"{PROGRAM} train: batch.global_size=7 is not divisible by 2 devices" in cause


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "expriment=smoke"], "unknown setting expriment; did you mean experiment?"),
        (
            ["train", "experiment=smoke", "resume=auto"],
            "resume=auto needs run_dir=runs/NAME, the run to continue or to start; "
            "set it, or leave resume=auto out",
        ),
        (
            ["generate", "run_dir=runs/first"],
            "run_dir=runs/first is a setting of train; here, write only the path: runs/first",
        ),
    ],
)
def test_a_word_that_means_another_gets_the_right_one(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"{PROGRAM} {words[0]}: {line}\n"
    assert not [*tmp_path.iterdir()]


def test_a_sweep_prints_each_job_once_and_marks_the_lowest_loss(command):
    out = command.train("-m", "optim.lr=1e-3,2e-3", "max_steps=2", "run_dir=sweep").stdout
    assert out.count("job 1: launch.inline=True optim.lr=0.002") == 1
    assert "#1 :" not in out  # Hydra's own line
    losses = [command.summary(f"sweep/{job}")["val_loss"] for job in (0, 1)]
    rows = out.splitlines()[-2:]
    assert rows[losses.index(min(losses))].endswith("  (lowest)")
    assert out.count("(lowest)") == 1


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("callbacks.sample.prompt=Once upon, a time", "to set it to this text, quote it for the "),
        ("run_name=first try, small", "to set it to this text, quote it for the shell and for "),
        ("optim.lr=1e-3, 3e-3", "add --multirun to run each"),
        ("optim=adamw, muon", "add --multirun to run each"),
    ],
)
def test_a_sentence_with_a_comma_is_no_list_of_values(word, remedy, capsys):
    assert cli.main(["train", word]) == 2
    assert remedy in capsys.readouterr().err


def test_a_key_with_a_dot_in_a_recipe_is_answered_with_two_lines(tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    recipe = "# @package _global_\ndefaults:\n  - smoke\noptim.lr: 1e-3\n"
    (tmp_path / "experiment/dotted.yaml").write_text(recipe)
    assert cli.main(["train", "--config-dir", str(tmp_path), "experiment=dotted"]) == 2
    rule = "optim.lr has a dot; in YAML, write optim: and, indented below it, lr: VALUE"
    assert rule in capsys.readouterr().err
