import errno
import os
import stat
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.whole_files import replace_text, replacing, write_output


def test_a_file_is_replaced_atomically_without_leftovers(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with replacing(path) as file:
        file.write("naïve".encode())
        assert path.read_text() == "old"
    assert path.read_text("utf-8") == "naïve"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_everything_is_as_before(tmp_path):
    path = tmp_path / "a.json"
    replace_text(path, "old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half of", "it"])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("operation", "name"),
    [("open", "EACCES"), ("open", "EISDIR"), ("fsync", "EBADF"), ("fsync", "EINVAL")],
)
def test_a_folder_that_cannot_be_flushed_needs_no_flush(tmp_path, monkeypatch, operation, name):
    # As to write but not to read it, or where a system opens or flushes no folders.
    real = getattr(os, operation)

    def lacking(what, *arguments):
        place = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what
        if Path(place).is_dir():
            raise OSError(number, os.strerror(number))
        return real(what, *arguments)

    number = getattr(errno, name)
    monkeypatch.setattr(os, operation, lacking)
    replace_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "new"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        replace_text(tmp_path / "a.json", "newer")


def test_a_missing_folder_gives_the_system_s_error(tmp_path):
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "nowhere/a"):
        pass


@pytest.mark.usefixtures("full_disk")
def test_an_output_on_a_full_disk_keeps_the_old_one(tmp_path):
    path = tmp_path / "report.html"
    write_output(path, "old")
    with pytest.raises(UserError, match=r"report\.html cannot be written \(.+\); raise the limit"):
        write_output(path, "new" * 9999)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_follows_a_link(tmp_path):
    (tmp_path / "link").symlink_to("folder/target")
    (tmp_path / "folder").mkdir()
    for content in ("new", b"newer"):
        write_output(tmp_path / "link", content)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder/target").read_text() == "newer"
    assert len(list((tmp_path / "folder").iterdir())) == 1


def test_an_output_may_be_a_pipe_which_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    write_output(path, "text")
    assert os.read(reader, 99) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)
