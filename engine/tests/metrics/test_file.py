import csv
import math

import pytest
from lightning.pytorch.loggers import CSVLogger

from lockstep.errors import RunError
from lockstep.metrics.file import MetricsFile

FEW = ["trainer/step", "train/loss", "val/loss"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


@pytest.fixture
def start(path):
    def at(step=0):
        file = MetricsFile(path, FEW)
        file.truncate_after(step)
        return file

    return at


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_new_file_is_its_header(start, path):
    start()
    assert path.read_text() == "trainer/step,train/loss,val/loss\n"


def test_each_row_is_there_as_soon_as_it_is_logged(start, path):
    file = start()
    for step in (1, 2, 3):
        file.log_metrics({"train/loss": 0.5 * step}, step)
        assert path.read_text().splitlines()[step:] == [f"{step},{0.5 * step},"]


def test_a_file_that_is_gone_ends_the_run_in_one_line(start, path):
    file = start()
    file.log_metrics({"train/loss": 1.0}, 1)
    path.unlink()
    with pytest.raises(RunError, match=r"No such file or directory: .* cannot be written"):
        file.log_metrics({"train/loss": 2.0}, 2)


def test_values_of_one_step_share_its_row(start, path):
    file = start()
    file.log_metrics({"train/loss": 1.0}, 5)
    file.log_metrics({"train/loss": 2.0}, 10)
    file.log_metrics({"val/loss": 3.25}, 10)
    assert [list(row.values()) for row in rows_of(path)] == [
        ["5", "1.0", ""],
        ["10", "2.0", "3.25"],
    ]


def test_a_new_value_of_one_step_replaces_the_old_one(start, path):
    file = start()
    file.log_metrics({"train/loss": 1.123456789, "val/loss": 1.0}, 5)
    file.log_metrics({"train/loss": 2.0}, 5)
    assert path.read_text().splitlines()[1:] == ["5,2.0,1.0"]


def test_a_new_column_keeps_the_rows_before_it(start, path):
    file = start()
    file.log_metrics({"train/loss": 1.0}, 1)
    file.log_metrics({"train/loss": 3.0}, 2)
    file.log_metrics({"a, b": 2.0}, 2)
    file.log_metrics({"train/loss": 4.0}, 3)
    assert list(rows_of(path)[0]) == [*FEW, "a, b"]
    assert [row["train/loss"] for row in rows_of(path)] == ["1.0", "3.0", "4.0"]
    assert [row["a, b"] for row in rows_of(path)] == ["", "2.0", ""]


@pytest.mark.parametrize("value", [1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e22, math.pi, 7])
def test_values_are_read_back_exactly(start, path, value):
    start().log_metrics({"train/loss": value}, 1)
    assert float(rows_of(path)[0]["train/loss"]) == value


def test_values_that_are_not_numbers_are_read_back(start, path):
    start().log_metrics({"train/loss": math.nan, "val/loss": math.inf}, 1)
    row = rows_of(path)[0]
    assert math.isnan(float(row["train/loss"]))
    assert float(row["val/loss"]) == math.inf


def test_a_resumed_run_drops_the_rows_that_it_repeats(start, path):
    file = start()
    for step in (5, 10, 15, 20):
        file.log_metrics({"train/loss": float(step)}, step)
    start(10).log_metrics({"train/loss": -15.0}, 15)
    losses = [(row["trainer/step"], row["train/loss"]) for row in rows_of(path)]
    assert losses == [("5", "5.0"), ("10", "10.0"), ("15", "-15.0")]


def test_a_resumed_run_may_add_to_the_row_where_it_starts(start, path):
    start().log_metrics({"train/loss": 1.0}, 10)
    start(10).log_metrics({"val/loss": 2.0}, 10)
    assert [list(row.values()) for row in rows_of(path)] == [["10", "1.0", "2.0"]]


def test_a_resumed_run_keeps_unknown_columns(start, path):
    start().log_metrics({"more": 1.0}, 1)
    start(1).log_metrics({"train/loss": 2.0}, 2)
    assert [row["more"] for row in rows_of(path)] == ["1.0", ""]


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_a_last_line_that_was_cut_off_is_dropped(start, path, cut):
    file = start()
    file.log_metrics({"train/loss": 1.5}, 1)
    file.log_metrics({"train/loss": 2.5}, 2)
    path.write_bytes(path.read_bytes()[:-cut])
    start(5).log_metrics({"train/loss": 3.5}, 3)
    losses = [(row["trainer/step"], row["train/loss"]) for row in rows_of(path)]
    assert losses == ([("1", "1.5"), ("3", "3.5")])


def test_a_new_run_inherits_nothing_from_an_old_one(start, path):
    start().log_metrics({"train/loss": 1.0}, 3)
    start(0)
    assert rows_of(path) == []


def test_no_other_file_is_written(start, path):
    start().log_metrics({"new": 1.0}, 1)
    assert list(path.parent.iterdir()) == [path]


def test_code_that_uses_the_logger_s_experiment_gets_the_first_tracker_s_or_a_dummy(start, path):
    file = start()
    file.experiment.add_scalar("x", 1.0, 1)  # as with `logger=none`, and on ranks above 0
    file.tracker = CSVLogger(path.parent / "tracker")
    assert file.experiment is file.tracker.experiment
