import pytest

from lockstep.errors import UserError
from lockstep.metrics.rows import read_metrics

HEADER = "trainer/step,train/loss,my/text"
ROWS = ("5,4.5,a", "10,,", '15,nan,"b, c"')


def written(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def test_sound_rows_are_read_as_text(path):
    table = read_metrics(written(path, HEADER, *ROWS))
    assert table.columns == HEADER.split(",")
    assert table.rows == [["5", "4.5", "a"], ["10", "", ""], ["15", "nan", "b, c"]]
    assert table.damaged == 0


@pytest.mark.parametrize(
    "line",
    [
        "abc",
        HEADER,  # again
        "\0\0\0,4,",
        "7,4.5",  # cut off, and then written on
        "7,4.5,a,b",
        "7,abc,a",
        "-7,4.5,a",
        "7.5,4.5,a",
        "5,4.5,again",
        '"7,4.5,a',
        "",
        "7,4.5,\ufffd",
    ],
)
def test_a_damaged_line_costs_no_other_row(path, line):
    table = read_metrics(written(path, HEADER, ROWS[0], line, *ROWS[1:]))
    assert [row[0] for row in table.rows] == ["5", "10", "15"]
    assert table.damaged == 1


@pytest.mark.parametrize(
    "recoded",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.encode() + b"20,4.",  # being written
    ],
)
def test_ends_of_lines_a_mark_and_a_cut_last_line_do_not_matter(path, recoded):
    sound = read_metrics(written(path, HEADER, *ROWS))
    path.write_bytes(recoded(path.read_text()))
    assert read_metrics(path) == sound


@pytest.mark.parametrize(
    ("content", "is_damaged"),
    [
        (b"", False),
        (b"trainer/st", True),
        (b"step,loss\n1,2\n", True),
        (bytes(range(256)), True),
        (f"{HEADER}\n5,1,a\n".encode("utf-16"), True),
    ],
    ids=["empty", "cut off", "another header", "binary", "UTF-16"],
)
def test_a_file_without_a_header_has_no_rows(path, content, is_damaged):
    path.write_bytes(content)
    table = read_metrics(path)
    assert (table.rows, table.damaged > 0) == ([], is_damaged)


def test_a_missing_file_has_no_rows_and_a_folder_is_refused(path):
    assert read_metrics(path).rows == []
    path.mkdir()
    with pytest.raises(UserError, match=r"metrics\.csv cannot be read: Is a directory"):
        read_metrics(path)
