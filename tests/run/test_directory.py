import errno
import json
import multiprocessing
import subprocess
import sys
import time

import pytest
import yaml

from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.run import directory as run_directory
from lockstep_gpt.run.directory import (
    RunDirectory,
    differences,
    refuse_another_identity,
)

VALUES = {
    "max_steps": 10,
    "run_name": "größer",
    "batch": {"global_size": 4},
    "model": {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8},
    "data": {"_target_": "lockstep_gpt.data.sources.stdlib.StandardLibrary"},
    "optim": {"algorithm": "adamw", "lr": 1e-8},
}


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "first")


def test_a_frozen_configuration_is_read_back_unchanged(run):
    run.create(VALUES)
    assert run.values() == VALUES
    config = run.load()
    assert (config.run_name, config.optim.lr, config.batch.global_size) == ("größer", 1e-8, 4)


def test_a_run_keeps_its_settings_and_lists_differences():
    refuse_another_identity("the run", VALUES, VALUES)
    free = {**VALUES, "max_steps": 99, "optim": {"algorithm": "adamw", "lr": 1.0}}
    refuse_another_identity("the run", VALUES, {**free, "data": {**VALUES["data"], "root": "x"}})
    other = {**VALUES, "seed": 2, "batch": {"global_size": 8}, "model": {"n_layer": 2}}
    with pytest.raises(UserError) as refused:
        refuse_another_identity("the run", {**VALUES, "seed": 1}, other)
    assert str(refused.value) == (
        "the run keeps its settings, but got batch.global_size=8 instead of 4, "
        "model.block_size=None instead of 8, model.n_layer=2 instead of 1 and 3 more; use "
        "the same, or set resume_force=true"
    )


def test_a_setting_is_kept_or_not_as_its_own_source_says():
    def with_path(source, path):
        target = f"lockstep_gpt.data.sources.{source}"
        return {**VALUES, "data": {"_target_": target, "val_path": path}}

    text, shards = "text.Text", "token_files.TokenFiles"
    refuse_another_identity("the run", with_path(text, "a"), with_path(text, "b"))
    with pytest.raises(UserError, match=r"data\.val_path=b instead of a"):
        refuse_another_identity("the run", with_path(shards, "a"), with_path(shards, "b"))


def test_settings_that_were_null_may_be_set_later():
    decided = {**VALUES, "data": {**VALUES["data"], "fingerprint": "ab" * 32}}
    refuse_another_identity("the run", VALUES, decided)
    left_open = {**VALUES, "data": {**VALUES["data"], "fingerprint": None}}
    refuse_another_identity("the run", left_open, decided)
    with pytest.raises(UserError, match=r"data\.fingerprint=None instead of abab"):
        refuse_another_identity("the run", decided, left_open)


def test_another_machine_never_reads_half_of_it(run, monkeypatch):
    def written(_values):
        assert not run.config.exists()
        return "max_steps: 10\n"

    monkeypatch.setattr("lockstep_gpt.run.directory._as_yaml", written)
    run.create(VALUES)
    assert run.values() == {"max_steps": 10}
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


def test_a_reference_to_the_environment_is_kept_in_the_file_and_resolved_by_who_reads(
    run, monkeypatch
):
    monkeypatch.setenv("RUN_NAME", "canary")
    run.create({**VALUES, "run_name": "${oc.env:RUN_NAME}"})
    assert "canary" not in run.config.read_text()
    assert run.load().run_name == "canary"


def test_the_hash_depends_on_the_values(run, tmp_path):
    run.create(VALUES)
    same, other = RunDirectory(tmp_path / "same"), RunDirectory(tmp_path / "other")
    same.create(VALUES)
    other.create({**VALUES, "seed": 1})
    assert run.hash() == same.hash() != other.hash()


def test_a_new_path_and_an_empty_folder_may_be_used(run):
    run.refuse_if_used()
    run.path.mkdir(parents=True)
    run.refuse_if_used()
    run.create(VALUES)
    assert run.config.is_file()


def test_a_folder_that_is_not_empty_is_rejected(run):
    run.checkpoints.mkdir(parents=True)
    with pytest.raises(UserError, match=r"^run_dir=\S+first already exists and is not empty; name"):
        run.refuse_if_used()


def test_another_run_or_a_file_is_rejected_and_unchanged(run, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    run.create({**VALUES, "seed": 7})
    with pytest.raises(UserError, match="already exists and is not empty"):
        run.create(VALUES)
    with pytest.raises(
        UserError, match=r"^run_dir=\S+file is a file; name a folder, or a new path$"
    ):
        RunDirectory(file).create(VALUES)
    assert (run.load().seed, file.read_text()) == (7, "mine")


def test_only_one_of_several_simultaneous_launches_gets_the_directory(run):
    context = multiprocessing.get_context("fork")
    together, ends = context.Barrier(8), context.Queue()

    def create():
        together.wait()
        try:
            with run.locked():
                run.create(VALUES)
                ends.put("mine")
                together.wait(60)  # until each has tried
        except UserError as error:
            ends.put(str(error))
            together.wait(60)

    processes = [context.Process(target=create) for _ in range(8)]
    [process.start() for process in processes]
    results = [ends.get(timeout=240) for _ in processes]
    [process.join() for process in processes]
    assert results.count("mine") == 1
    assert all("in use by" in result or result == "mine" for result in results)
    assert run.values() == VALUES


def test_leftovers_of_a_killed_start_do_not_matter(run):
    run.path.mkdir(parents=True)
    for name in (".lock", ".config.yaml.tmp"):
        (run.path / name).write_text("half of it")
    run.create(VALUES)
    assert run.values() == VALUES


def test_a_place_that_cannot_be_written_is_rejected_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^Not a directory: \S+ cannot be written; set another"):
        RunDirectory(tmp_path / "file" / "run").create(VALUES)


def test_a_directory_that_could_not_be_created_can_be_used_later(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(run_directory, "replace_text", full)
        with pytest.raises(RunError, match=r"No space left on device: .+ cannot be written"):
            run.create(VALUES)
    run.refuse_if_used()
    run.create(VALUES)
    assert run.values() == VALUES


def test_a_folder_without_a_frozen_configuration_is_not_a_run_directory(run):
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.yaml"):
        run.values()


@pytest.mark.parametrize("text", ["", "a: [", "just words"])
def test_a_damaged_frozen_file_fails_in_one_line(run, text):
    run.create(VALUES)
    run.config.write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml is damaged; restore the original"):
        run.values()


def test_a_summary_is_replaced_as_a_whole(run):
    run.create(VALUES)
    assert run.read_summary() == {}
    run.write_summary({"status": "failed", "step": 5})
    run.write_summary({"status": "done"})
    assert run.read_summary() == {"status": "done"}
    assert {path.name for path in run.path.iterdir()} == {"config.yaml", "summary.json"}


def test_a_summary_that_cannot_be_written_leaves_the_old_one(run):
    run.create(VALUES)
    run.write_summary({"status": "done"})
    with pytest.raises(TypeError):
        run.write_summary({"status": run})
    assert run.read_summary() == {"status": "done"}


def test_only_the_first_failure_is_recorded(run):
    run.create(VALUES)
    assert run.read_failure() == {}
    assert run.record_failure({"rank": 1, "error": "first"})
    assert not run.record_failure({"rank": 0, "error": "second"})
    assert run.read_failure() == {"rank": 1, "error": "first"}
    assert json.loads(run.failed.read_text())["rank"] == 1


def test_a_run_that_never_began_is_discarded_but_never_one_that_saved(run):
    run.create(VALUES)
    run.discard()
    assert not run.path.exists()
    run.create(VALUES)
    run.checkpoints.mkdir()
    run.discard()
    assert yaml.safe_load(run.config.read_text()) == VALUES


def test_every_rank_has_its_own_log(run):
    assert len({run.rank_log(rank) for rank in range(3)} | {run.log}) == 4
    assert run.rank_log(2).parent.parent == run.path


@pytest.mark.parametrize(
    ("name", "value", "differs"),
    [("node_rank", 1, False), ("rdzv_endpoint", "b:1", True), ("max_restarts", 0, True)],
)
def test_of_how_ranks_start_only_the_machine_s_own_number_may_differ(name, value, differs):
    launch = {"node_rank": 0, "rdzv_endpoint": "a:1", "max_restarts": 3}
    lines = differences({"launch": launch}, {"launch": {**launch, name: value}})
    line = f"launch.{name}={value} instead of {launch[name]}"
    assert lines == ([line] if differs else [])


WRITER = """
import sys, time
from pathlib import Path
from lockstep_gpt.run.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).writer_locked():
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def writing(run):
    """Let a rank 0 that lost its command keep writing for some seconds."""
    run.path.mkdir(parents=True, exist_ok=True)
    run.lock.write_text("process 77 on another")
    started = []

    def write(seconds):
        words = [sys.executable, "-c", WRITER, str(run.path), str(seconds)]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "locked\n"

    yield write
    for process in started:
        process.kill()
        process.communicate()


def test_a_command_waits_until_the_last_rank_zero_has_ended(run, writing):
    writing(0.5)
    before = time.monotonic()
    with run.locked():
        assert time.monotonic() - before > 0.3


def test_a_run_whose_rank_zero_still_writes_has_no_second_writer(run, writing, monkeypatch):
    monkeypatch.setattr(run_directory, "WRITER_SECONDS", 0.1)
    writing(600)
    for lock in (run.locked(), run.writer_locked()):
        with pytest.raises(UserError, match="is in use by process 77 on another; wait for it"):
            lock.__enter__()


def test_rank_zero_can_write_while_its_command_has_the_lock(run, writing):
    with run.locked():
        writing(0)


def test_a_file_system_without_locks_is_reported_once(run, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_directory.fcntl, "lockf", refuse)
    with run.locked(), run.writer_locked():
        pass
    line = f"run_dir={run.path} cannot be locked (No locks available): run it once\n"
    assert capsys.readouterr().out == line
