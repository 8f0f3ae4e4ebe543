import pytest

from lockstep.errors import UserError
from lockstep.metrics.trace_file import (
    FIXED,
    TraceFile,
    TraceRow,
    as_digits,
    read_trace,
)
from lockstep.run.directory import RunDirectory


def row(step):
    pairs = [as_digits(10 * step), as_digits(7)]
    return TraceRow(
        step,
        as_digits(3),
        pairs,
        pairs,
        pairs,
        ["0000000a"] * 3,
        ["ffffffaa"] * 3,
        ["00000001"] * 3,
    )


@pytest.fixture
def trace(tmp_path):
    return TraceFile(RunDirectory(tmp_path), ["first", "second", "third"])


def test_rows_are_read_as_written_and_cut_after_the_step_of_a_resume(trace):
    trace.truncate_after(0)
    trace.append([row(1), row(2)])
    trace.append([row(3)])
    columns, rows = read_trace(trace.run.trace)
    assert columns[-3:] == ["first", "second", "third"]
    assert rows == [row(1), row(2), row(3)]
    trace.truncate_after(2)
    trace.append([row(3), row(4)])
    assert read_trace(trace.run.trace)[1] == [row(1), row(2), row(3), row(4)]


def test_rows_of_other_tensors_are_not_continued(trace):
    trace.truncate_after(0)
    trace.append([row(1)])
    TraceFile(trace.run, ["other"]).truncate_after(9)
    assert read_trace(trace.run.trace) == ([*FIXED, "other"], [])


def test_a_row_that_is_being_written_is_not_one_yet(trace):
    trace.truncate_after(0)
    trace.append([row(1), row(2)])
    text = trace.run.trace.read_text()
    trace.run.trace.write_text(text[:-9])
    assert read_trace(trace.run.trace)[1] == [row(1)]


def test_a_damaged_file_is_one_line(trace):
    trace.truncate_after(0)
    trace.append([row(1), row(2)])
    trace.run.trace.write_text(trace.run.trace.read_text().replace("0000000a", "0000"))
    with pytest.raises(UserError, match=r"trace\.csv is damaged; move it away"):
        read_trace(trace.run.trace)


def test_digits_show_each_flipped_bit_of_a_sum():
    digits = {as_digits(12345 + sign * (1 << bit)) for bit in range(32) for sign in (1, -1)}
    assert as_digits(12345) not in digits
    assert len(digits) == 64
    assert as_digits(12345 + (1 << 45)) != as_digits(12345)
    assert {len(text) for text in digits} == {8}
