import json
import logging
import multiprocessing

import pytest
import yaml

from lockstep.errors import RunError, UserError
from lockstep.run import directory as run_directory
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory, differences
from lockstep.run.frozen_file import frozen_text

VALUES = {
    "max_steps": 10,
    "run_name": "größer",
    "batch": {"global_size": 4},
    "model": {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8},
    "data": {"_target_": "lockstep.tokens.sources.text.StandardLibrary"},
    "optim": {"algorithm": "adamw", "lr": 1e-8},
}


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "first")


def test_a_frozen_configuration_is_read_back_unchanged(run):
    run.create(VALUES)
    assert run.values() == VALUES
    assert run.resolved() == VALUES


def test_another_machine_never_reads_half_of_it(run, monkeypatch):
    def written(values):
        assert not run.config.exists()
        return frozen_text(values)

    monkeypatch.setattr("lockstep.run.directory.frozen_text", written)
    run.create(VALUES)
    assert run.values() == VALUES
    assert {path.name for path in run.path.iterdir()} == {".token", "config.yaml"}


def test_a_reference_to_the_environment_is_kept_in_the_file_and_resolved_by_who_reads(
    run, monkeypatch
):
    monkeypatch.setenv("RUN_NAME", "canary")
    run.create({**VALUES, "run_name": "${oc.env:RUN_NAME}"})
    assert "canary" not in run.config.read_text()
    assert run.resolved()["run_name"] == "canary"


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
    remedy = f"name another one and add resume={run.path}, or restore {run.config}"
    with pytest.raises(UserError, match=rf"^run_dir=\S+first already exists .*; {remedy}$"):
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
    assert (run.resolved()["seed"], file.read_text()) == (7, "mine")


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
    for name in (".lock", ".config.yaml.tmp", ".token", "..token.tmp"):
        (run.path / name).write_text("half of it")
    run.create(VALUES)
    assert run.values() == VALUES


def test_a_run_has_a_name_of_its_own_in_memory(run, tmp_path):
    run.create(VALUES)
    token = run.token()
    run.refreeze(VALUES)
    assert run.token() == token
    another = RunDirectory(tmp_path / "another")
    another.create(VALUES)
    assert another.token() != token
    run.name_in_memory.write_text("../elsewhere")
    assert run.token() is None
    run.name_in_memory.unlink()  # an earlier version created the run
    run.refreeze(VALUES)
    assert run.token() is not None


def test_a_place_that_cannot_be_written_is_rejected_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^Not a directory: \S+ cannot be written; set another"):
        RunDirectory(tmp_path / "file" / "run").create(VALUES)


def test_a_folder_in_the_place_of_a_file_of_the_run_is_named(run):
    run.create(VALUES)
    run.name_in_memory.unlink()
    run.name_in_memory.mkdir()
    rule = rf"^Is a directory: {run.name_in_memory} cannot be written; fix that"
    with pytest.raises(UserError, match=rule), run.writing(UserError):
        run.refreeze(VALUES)


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


def test_a_frozen_file_that_was_cut_off_anywhere_is_refused(run):
    run.create(VALUES)
    text = run.config.read_text()
    for end in [place + 1 for place, sign in enumerate(text[:-1]) if sign == "\n"]:
        run.config.write_text(text[:end])
        with pytest.raises(UserError, match=r"config\.yaml is damaged; restore the original$"):
            run.values()


def test_a_reference_to_nothing_in_a_frozen_file_is_refused_in_one_line(run):
    run.create({**VALUES, "seed": "${nowhere}"})
    with pytest.raises(UserError, match=r"config\.yaml: seed: .*nowhere.*; set it$"):
        run.resolved()


def test_values_that_contain_themselves_are_refused(run):
    run.create(VALUES)
    run.config.write_text(run.config.read_text().replace("größer", "&name [*name]"))
    with pytest.raises(UserError, match="is damaged; restore the original"):
        run.values()


DAMAGED = {
    b"": "is damaged (not JSON)",
    b'{"status": "do': "is damaged (not JSON)",
    b"[" * 100_000: "is damaged (not JSON)",
    '{"status": "schön"}'.encode("latin-1"): "is damaged (not JSON)",
    b"[1, 2]": "is damaged (not an object)",
    b'{"step": "x"}': "has step=x",
    b'{"last_checkpoint": 5}': "has last_checkpoint=5",
}


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:20]))
def test_a_damaged_summary_is_ignored_with_one_warning(run, content, caplog):
    run.create(VALUES)
    run.summary.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert (run.read_summary(), run.read_summary()) == ({}, {})
    assert caplog.messages == [f"{run.summary} {DAMAGED[content]}; ignored"]
    run.write_summary({"status": "done"})
    assert run.read_summary() == {"status": "done"}


def test_a_summary_is_replaced_as_a_whole(run):
    run.create(VALUES)
    assert run.read_summary() == {}
    run.write_summary({"status": "failed", "step": 5})
    run.write_summary({"status": "done"})
    assert run.read_summary() == {"status": "done"}
    files = {path.name for path in run.path.iterdir()}
    assert files == {".token", "config.yaml", "summary.json"}


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


def test_a_long_error_is_recorded_without_its_middle(run):
    run.create(VALUES)
    assert last_line.record(run, 0, 1, RuntimeError("first" + "x" * 120_000 + "last"), "a line")
    error = run.read_failure()["error"]
    assert error.startswith("RuntimeError: firstx")
    assert "[110,023 characters]" in error
    assert error.endswith("xlast")
    assert len(error) < last_line.LONGEST_ERROR + 100


@pytest.mark.usefixtures("full_disk")
def test_a_failure_that_cannot_be_written_leaves_no_half_of_it(run):
    run.path.mkdir(parents=True)
    assert run.record_failure({"error": "x" * 9999})
    assert not list(run.path.iterdir())


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
