"""Data are prepared on a disk that lacks an operation; a broken one ends it with what helps."""

import errno
import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import RunError, UserError
from lockstep.mixtures.mixture import Mixture
from lockstep.mixtures.whole_documents import WholeDocuments, folder_within
from lockstep.tokens.prepare import prepare
from lockstep.tokens.prepared import open_windows
from lockstep.tokens.shards import check_content, load_index, open_split
from lockstep.tokens.sources.text import Text

# What a disk lacks: the functions that fail, each with the number of the argument that says where.
OPERATIONS = {
    "locks": [(fcntl, "flock", 0)],
    "flushing": [(os, "fsync", 0)],
    "hard links": [(os, "link", 1)],
    "links": [(os, "link", 1), (os, "symlink", 1)],
    "cutting": [(os, "truncate", 0), (os, "ftruncate", 0)],
    "permissions": [(os, "chmod", 0), (os, "fchmod", 0)],
    "shared maps": [(mmap, "mmap", 0)],
}
IN_MIXTURE = "data"  # `root` of its sources, which only the mixture has
LACKING = [errno.ENOSYS, errno.ENOTSUP, errno.EINVAL]
CASES = [
    *((name, number) for name in OPERATIONS for number in LACKING),
    ("locks", errno.ENOLCK),
    ("hard links", errno.EPERM),
    ("links", errno.EPERM),
    ("shared maps", errno.ENODEV),
]


def place_of(argument):
    """Return the path of what a function is called with."""
    if isinstance(argument, str | bytes | os.PathLike):
        return str(Path(os.fsdecode(argument)).absolute())
    number = argument if isinstance(argument, int) else argument.fileno()
    return "" if number < 0 else str(Path(f"/proc/self/fd/{number}").readlink())


@pytest.fixture
def take_away(monkeypatch, tmp_path):
    """Return a function that lets functions fail below `data.root`."""

    def take(functions, number):
        for module, name, argument in functions:
            true = getattr(module, name)

            def fail(*arguments, _true=true, _argument=argument, **options):
                if place_of(arguments[_argument]).startswith(str(tmp_path / "data")):
                    raise OSError(number, os.strerror(number))
                return _true(*arguments, **options)

            monkeypatch.setattr(module, name, fail)

    return take


@pytest.fixture
def text(tmp_path):
    """A corpus of 40 documents; returns a function that makes the settings for it."""
    draw = np.random.default_rng(1)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        words = draw.choice([*"abcdefgh \n"], 20 + 3 * number)
        (tmp_path / "texts" / f"{number}.txt").write_text("".join(words))

    def settings(root=tmp_path / "data", **changes):
        return Text(root=str(root), path=str(tmp_path / "texts"), val_fraction=0.3, **changes)

    return settings


def content(folder):
    """Return the content of a prepared folder, by file name; a mixture names its sources."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".bin"}


def made(text, root):
    """Prepare and pack a text, and a mixture with it; return the content of both folders."""
    folder = prepare(text(root))
    windows = open_windows(folder, 16, WholeDocuments())
    rows = [window.ids.tolist() for window in windows["train"].__getitems__([0, 3, 5])]
    sources = {"text": text(IN_MIXTURE), "lines": text(IN_MIXTURE, documents="line")}
    mixture = Mixture(root=str(root), sources=sources, weights=dict.fromkeys(sources, 1.0))
    mixed = prepare(mixture)
    check_content(mixed, load_index(mixed))
    tokens = open_split(mixed, "text/train").tolist()
    return content(folder), content(mixed), rows, tokens


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the paths of open files")
@pytest.mark.parametrize(("lacking", "number"), CASES)
def test_data_are_prepared_on_a_disk_that_lacks(text, tmp_path, take_away, caplog, lacking, number):
    expected = made(text, tmp_path / "elsewhere")
    take_away(OPERATIONS[lacking], number)
    assert made(text, tmp_path / "data") == expected
    warned = [record.message for record in caplog.records if "without locks" in record.message]
    line = f"data.root={tmp_path / 'data'} is on a disk without locks: prepare it only once"
    assert warned == [line] * (lacking == "locks")
    assert not [*tmp_path.glob("data/**/.*.unfinished")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("lacking", ["locks", "flushing", "hard links"])
def test_a_broken_disk_ends_it(text, tmp_path, take_away, lacking, number):
    take_away(OPERATIONS[lacking], number)
    with pytest.raises(UserError, match=r"data\.root=.* cannot be written"):
        made(text, tmp_path / "data")


NO_RENAMING = [(os, "rename", 1), (os, "replace", 1)]
ENDS = {
    errno.EIO: "its disk, or the network to it, has failed: check it, or set data.root to another",
    errno.EROFS: "its file system is read-only: set data.root to another folder",
    errno.ENOSPC: "make room on its disk (finished work is kept), or set data.root to a folder",
    errno.EDQUOT: "make room within your quota (finished work is kept), or set data.root to a",
    errno.EACCES: "permit it, or set data.root to a folder that you may write",
    errno.EFBIG: "raise the limit on the size of files, as ulimit -f shows it",
    errno.ENOSYS: "its disk cannot do this: set data.root to a folder on another disk",
}


@pytest.mark.parametrize(("number", "remedy"), ENDS.items())
def test_what_cannot_be_written_is_answered_by_its_cause(text, take_away, number, remedy):
    take_away(NO_RENAMING, number)
    kind = RunError if number in (errno.ENOSPC, errno.EDQUOT) else UserError
    with pytest.raises(kind) as caught:
        prepare(text())
    line = str(caught.value)
    assert line.startswith("data.root=")
    assert f"({os.strerror(number)}); {remedy}" in line
    assert "\n" not in line


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_folder_that_cannot_be_made_is_answered_by_its_cause(text, take_away, number):
    take_away([(os, "mkdir", 0)], number)
    with pytest.raises((RunError, UserError)) as caught:
        prepare(text())
    assert ENDS[number].partition(" (")[0] in str(caught.value)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT])
def test_windows_that_cannot_be_written_are_answered_by_their_cause(text, take_away, number):
    folder = prepare(text())
    take_away(NO_RENAMING, number)
    with pytest.raises(UserError, match=r"where packing=documents keeps its windows; ") as caught:
        WholeDocuments().prepare(folder, 16)
    assert ENDS[number].partition(" (")[0] in str(caught.value)


def test_a_tokenizer_that_cannot_be_written_is_answered_by_its_cause(text, tmp_path, take_away):
    pytest.importorskip("tokenizers")
    learned = {"tokenizer": "bpe", "vocab_size": 300}
    sources = {"a": text(IN_MIXTURE, **learned), "b": text(IN_MIXTURE, documents="line")}
    settings = {"sources": sources, "weights": {"a": 1.0, "b": 1.0}, "tokenizer_from": "a"}
    root = str(tmp_path / "data")
    prepare(text(**learned))
    take_away(NO_RENAMING, errno.EROFS)
    with pytest.raises(UserError, match=rf"^data\.root={root} cannot be written \(.*read-only"):
        prepare(Mixture(root=root, **settings))


def test_a_file_that_an_own_source_lacks_is_not_blamed_on_the_root(text, tmp_path, monkeypatch):
    def blocks(*_):
        yield from ()
        (tmp_path / "notes").read_text()

    monkeypatch.setattr(Text, "blocks", blocks)
    with pytest.raises(FileNotFoundError, match="notes"):
        prepare(text())


def test_a_killed_build_begins_again_where_files_cannot_be_cut(text, tmp_path, take_away):
    whole = prepare(text(tmp_path / "elsewhere"))
    leftover = tmp_path / "data" / f".{whole.name}.unfinished"
    leftover.mkdir(parents=True)
    for path in whole.iterdir():
        (leftover / path.name).write_bytes(path.read_bytes() + b"more" * (path.suffix == ".bin"))
    take_away(OPERATIONS["cutting"], errno.ENOSYS)
    assert content(prepare(text())) == content(whole)


def test_without_locks_machines_build_in_folders_of_their_own(text, tmp_path, take_away):
    name = prepare(text(tmp_path / "elsewhere")).name
    theirs = tmp_path / "data" / f".{name}.on-other.unfinished"
    theirs.mkdir(parents=True)
    (theirs / "train-00000.bin").write_bytes(b"theirs")
    mine = tmp_path / "data" / f".{name}.on-{socket.gethostname()}.unfinished"
    mine.mkdir()
    (mine / "train-00000.bin").write_bytes(b"of a killed build")
    take_away(OPERATIONS["locks"], errno.ENOLCK)
    assert content(prepare(text())) == content(tmp_path / "elsewhere" / name)
    assert (theirs / "train-00000.bin").read_bytes() == b"theirs"
    assert not mine.exists()


def test_without_locks_ranks_pack_at_once(text, take_away):
    folder = prepare(text())
    take_away(OPERATIONS["locks"], errno.ENOLCK)
    faults = []

    def pack():
        try:
            WholeDocuments().prepare(folder, 16)
        except UserError as error:
            faults.append(error)

    ranks = [threading.Thread(target=pack) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert not faults
    assert folder_within(folder, 16).is_dir()
    assert not [*folder.glob(".*.unfinished")]
