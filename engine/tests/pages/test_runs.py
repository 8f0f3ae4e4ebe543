import json
import logging
import shutil

import pytest

from lockstep.pages.runs import read_curves, read_run

HEADER = "trainer/step,trainer/tokens,train/loss,val/loss\n"


@pytest.fixture
def run(recorded, tmp_path):
    """A copy of a finished run, to change."""
    return shutil.copytree(recorded[0], tmp_path / "run")


def test_a_finished_run_shows_how_it_ended(recorded):
    content = read_run(recorded[0])
    assert (content.name, content.status, content.changes) == ("recorded", "done", [])
    assert content.summary == json.loads((recorded[0] / "summary.json").read_text())
    (receipt,) = content.receipts
    assert receipt["devices"].startswith("2 x cpu")
    assert receipt["schedule"].startswith("20 steps: 5 of warmup")


def test_the_sample_is_the_one_on_the_screen(recorded):
    ((step, text),) = read_run(recorded[0]).samples
    samples = [line for line in recorded[1].splitlines() if line.startswith("  | ")]
    assert step == 20
    assert [f"  | {line}" for line in text.split("\n")] == samples


def test_a_live_run_is_read_up_to_its_last_complete_row(run):
    (run / "summary.json").unlink()
    with (run / "metrics.csv").open("a") as file:
        file.write("25,640")
    content = read_run(run)
    assert content.status.startswith("still running")
    assert content.curves["train/loss"][-1][0] == 20


def test_a_summary_of_an_earlier_part_is_not_the_status(run):
    with (run / "metrics.csv").open("a") as file:
        columns = (run / "metrics.csv").read_text().splitlines()[0].count(",")
        file.write("25,6400,2.5" + "," * (columns - 2) + "\n")
    assert read_run(run).status.startswith("still running")


def test_a_failed_run_shows_rank_and_error(run):
    (run / "failed.json").write_text('{"rank": 1, "status": 1, "error": "RunError: too hot"}')
    assert read_run(run).status == "failed on rank 1: RunError: too hot"


def test_damaged_files_are_left_out_of_the_report_by_name(run, caplog):
    whole = read_run(run)
    with (run / "metrics.csv").open("a") as file:
        file.write("\0\0\nabc\n")
    for name in ("summary.json", "failed.json", "environment.json"):
        (run / name).write_text('{"git_revi')
    for name in ("train.log", "overrides.log"):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()
    with caplog.at_level(logging.WARNING):
        content = read_run(run)
    assert content.curves == whole.curves
    assert (content.summary, content.environment, content.changes) == ({}, {}, [])
    assert sorted(caplog.messages) == [
        f"{run}/environment.json is damaged (not JSON); ignored",
        f"{run}/failed.json is damaged (not JSON); ignored",
        f"{run}/metrics.csv: left out 2 damaged lines",
        f"{run}/overrides.log cannot be read (Is a directory); ignored",
        f"{run}/summary.json is damaged (not JSON); ignored",
        f"{run}/train.log cannot be read (Is a directory); ignored",
    ]


def test_a_run_without_steps_shows_no_curves(run, tmp_path):
    (tmp_path / "new").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "new")
    content = read_run(tmp_path / "new")
    assert (content.curves, content.receipts, content.samples) == ({}, [], [])
    assert content.status.startswith("still running")


def test_values_are_read_with_step_and_tokens_and_without_gaps(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(HEADER + "1,10,3.5,\n2,20,,2.5\n3,30,nan,\n")
    curves = read_curves(path)
    assert curves["train/loss"][0] == (1, 10, 3.5)
    assert str(curves["train/loss"][1]) == "(3.0, 30.0, nan)"
    assert curves["val/loss"] == [(2, 20, 2.5)]


def test_an_empty_column_gives_no_curve(tmp_path):
    (tmp_path / "metrics.csv").write_text(HEADER + "1,10,3.5,\n")
    assert list(read_curves(tmp_path / "metrics.csv")) == ["train/loss"]


def test_missing_tokens_are_not_a_number(tmp_path):
    (tmp_path / "metrics.csv").write_text(HEADER + "1,,3.5,\n")
    assert str(read_curves(tmp_path / "metrics.csv")["train/loss"]) == "[(1.0, nan, 3.5)]"


def test_a_column_of_words_gives_no_curve(tmp_path):
    (tmp_path / "metrics.csv").write_text(f"{HEADER.strip()},my/word\n1,10,3.5,,fine\n")
    assert list(read_curves(tmp_path / "metrics.csv")) == ["train/loss"]
