"""Which objects a run directory from elsewhere may build, and which it may not."""

import shutil

import pytest
import yaml
from lockstep_gpt import CONFIGS

from lockstep.run import trust

WATCHED = """
import pathlib, lightning
pathlib.Path("imported").touch()
class Watched(lightning.Callback):
    def __init__(self, word=""):
        pathlib.Path("built").write_text(word)
"""
# The only rank of a launcher.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
RESUME = ("train", "run_dir=run", "resume=auto", "launch.inline=true")


def foreign_settings(values):
    """Return the settings that the project's YAML files don't know."""
    return trust.foreign_settings(values, [CONFIGS])


@pytest.mark.parametrize(
    "target",
    [
        "lockstep_gpt.sample.Sample",
        "lockstep.strategies.placing.ddp",
        "lightning.pytorch.Trainer",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.loggers.CSVLogger",
    ],
)
def test_classes_of_the_project_and_of_lightning_need_no_permission(target):
    assert not foreign_settings({"callbacks": {"one": {"_target_": target, "every": 3}}})


@pytest.mark.parametrize(
    "node",
    [
        {"_target_": "killer.Kill"},
        {"_target_": "os.system", "_args_": ["true"]},
        {"_target_": "torch.serialization.os.system"},
        {"_target_": "lockstep.launch.start.subprocess.Popen"},
        {"_target_": "lockstep.commands.main"},
        {"_target_": "lightning.pytorch.callbacks.timer.time.sleep"},
        {"_target_": "torch.distributed.elastic.multiprocessing.SubprocessHandler"},
        {"_target_": "lightning.pytorch.Trainer\n"},
        {"_target_": "${seed}"},
        {"_target_": None},
        {"_target_": ["os.system"]},
        {"_target_": {"_target_": "os.system"}},
        {"_target_": "lightning.pytorch.Trainer", "plugins": [{"_target_": "os.system"}]},
        {"_target_": "lightning.pytorch.Trainer", "logger": [[{"_target_": "os.system"}]]},
        {"_target_": "lightning.pytorch.Trainer", "profiler": {"_target_": "os.system"}},
        '${oc.decode:"{_target_: os.system}"}',
        {"word": "\\${oc.decode:x}"},
        {"entity": "${oc.env:SECRET}"},
        {"a": {"_target_": "os.system"}, "a._target_": "lightning.pytorch.Trainer"},
    ],
)
def test_other_code_and_references_need_permission(node):
    assert foreign_settings({"callbacks": {"one": node}})


def test_a_class_that_a_file_in_configs_names_needs_no_permission(tmp_path):
    run = {"callbacks": {"mine": {"_target_": "lockstep.run.callbacks.norm.Norm"}}}
    assert foreign_settings(run)
    lines = "mine:\n  _target_: lockstep.run.callbacks.norm.Norm\n"
    (tmp_path / "norm.yaml").write_text(lines)
    assert not trust.foreign_settings(run, [tmp_path])


def test_references_to_other_settings_need_no_permission_for_themselves():
    known = {"_target_": "lockstep_gpt.sample.Sample", "length": "${size}"}
    assert not foreign_settings({"callbacks": {"one": "${known}"}, "known": known, "size": 3})
    assert not foreign_settings({"kept": ["seed", "optim._target_"], "nothing": "???"})


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "os.system", "one": {"_target_": "${kind}"}},
        {"a": "os", "b": "system", "one": {"_target_": "${a}.${b}"}},
        {"a": "$", "b": "{oc.env:HOME}", "one": "${a}${b}"},
        {"a": "oc.env", "one": "${${a}:HOME}"},
    ],
)
def test_what_references_mean_needs_permission(more):
    assert foreign_settings(more)


def test_permission_for_a_class_is_for_its_arguments_too():
    one, other = ({"a": {"_target_": "mine.Run", "words": word}, "seed": 1} for word in "xy")
    assert foreign_settings(one) != foreign_settings(other)
    assert foreign_settings(one) == foreign_settings({**one, "seed": 2})


@pytest.fixture
def foreign_run(finished, command):
    """A copy of a run in which someone has named foreign code."""
    (command.folder / "theirs.py").write_text(WATCHED)
    run = command.folder / "run"
    shutil.copytree(finished[0].folder / "runs/first", run)
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["callbacks"]["watched"] = {"_target_": "theirs.Watched", "word": str(run)}
    (run / "config.yaml").write_text(yaml.safe_dump({**values, "trust_run_dir": True}))
    return run


@pytest.mark.slow
def test_a_foreign_run_directory_cannot_build_classes(foreign_run, command):
    frozen = (foreign_run / "config.yaml").read_bytes()
    stderr = command(*RESUME, "max_steps=25", status=2).stderr
    assert stderr.count("\n") == 1
    assert "run_dir=run: its config.yaml has callbacks.watched._target_=theirs.Watched" in stderr
    assert "trust_run_dir=true" in stderr
    assert not (command.folder / "imported").exists()
    assert (foreign_run / "config.yaml").read_bytes() == frozen
    command(*RESUME, "max_steps=25", "trust_run_dir=true")
    assert (command.folder / "built").read_text() == str(foreign_run)
    command(*RESUME, "max_steps=26")  # once permitted, it is known


@pytest.mark.parametrize("place", [".hydra/hydra.yaml", "config.yaml"])
def test_a_foreign_run_directory_cannot_choose_where_and_how_to_log(finished, command, place):
    run = command.folder / "run"
    shutil.copytree(finished[0].folder / "runs/first", run)
    handler = {"class": "logging.FileHandler", "filename": str(run / "written"), "mode": "w"}
    logging = {"version": 1, "root": {"handlers": []}, "handlers": {"theirs": handler}}
    values = yaml.safe_load((run / place).read_text())
    values.setdefault("hydra", {})["job_logging"] = logging
    (run / place).write_text(yaml.safe_dump(values))
    stderr = command(*RESUME, "max_steps=25", status=2).stderr
    assert "run_dir=run: its .hydra/hydra.yaml has hydra.job_logging" in stderr
    assert "trust_run_dir=true" in stderr
    assert not (run / "written").exists()
    command(*RESUME, "max_steps=25", "trust_run_dir=true")
    assert (run / "written").exists()


@pytest.mark.parametrize("launched", [False, True])
def test_no_data_is_read_for_a_reference_before_permission(finished, command, launched):
    shutil.copytree(finished[0].folder / "runs/first", command.folder / "run")
    (command.folder / "corpus.txt").write_text("some text to learn from. " * 400)
    config = command.folder / "run/config.yaml"
    values = yaml.safe_load(config.read_text())
    target = "lockstep.tokens.sources.text.Text"
    values["data"]["source"] = {"_target_": target, "path": "${oc.env:WHERE}"}
    values["data"]["root"] = "prepared"
    config.write_text(yaml.safe_dump({**values, "model": {**values["model"], "block_size": 8}}))
    ranks = ALONE
    words = (*RESUME[:3], "max_steps=25", *(() if launched else RESUME[3:]))
    stderr = command(*words, status=2, WHERE="corpus.txt", **(ranks if launched else {})).stderr
    assert "its config.yaml has data.source.path=${oc.env:WHERE}, which no run that you" in stderr
    assert not (command.folder / "prepared").exists()


def test_ranks_of_a_launcher_reject_it_too(foreign_run, command):
    stderr = command(*RESUME[:3], "max_steps=25", status=2, **ALONE).stderr
    assert "trust_run_dir=true" in stderr
    assert "trust_run_dir: true" in (foreign_run / "config.yaml").read_text()
    assert not (command.folder / "imported").exists()


@pytest.mark.slow
def test_a_user_s_own_run_resumes_and_elsewhere_with_its_command(command):
    (command.folder / "mine.py").write_text(WATCHED)
    mine = ("+callbacks.mine._target_=mine.Watched", "run_dir=run")
    command.train(*mine, "max_steps=12")
    command(*RESUME, "max_steps=14")
    (command.folder / "file").touch()
    fresh = {"XDG_STATE_HOME": str(command.folder / "file")}  # nothing can be stored there
    assert "trust_run_dir" in command(*RESUME, "max_steps=16", status=2, **fresh).stderr
    command.train(*mine, "resume=auto", "max_steps=16", **fresh)
    stderr = command(*RESUME, "max_steps=18", status=2, **fresh).stderr
    assert "callbacks.mine._target_=mine.Watched" in stderr
    command(*RESUME, "max_steps=18", "trust_run_dir=true", **fresh)
    assert command.summary("run")["step"] == 18
