import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.ranks.ranks import Ranks
from lockstep.ranks.waiting import MeetingError
from lockstep.tokens import build as build_module
from lockstep.tokens import prepare as prepare_module
from lockstep.tokens.prepare import prepare, prepare_once
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources.source import split_of_name
from lockstep.tokens.sources.text import StandardLibrary, Text
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

PREPARE = """
import sys
from lockstep.tokens.prepare import prepare
from lockstep.tokens.sources.text import *
if __name__ == "__main__":
    print(prepare(eval(sys.argv[1])))
"""
MIB = 1 << 20


def start(config):
    command = [sys.executable, "-c", PREPARE, repr(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(config):
    """Prepare in a separate process and return the folder."""
    build = start(config)
    out, err = build.communicate()
    assert build.returncode == 0, err
    return Path(out.strip())


def content(folder):
    """Return the content of a prepared folder, by file name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prepared(root):
    return [path for path in root.iterdir() if not path.name.startswith(".")]


@pytest.fixture
def small(tmp_path_factory):
    """A file of `size` bytes; returns a function that creates the settings for it."""
    path = tmp_path_factory.mktemp("corpus") / "text"

    def settings(root, size=1000, **changes):
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(b"a" * size)
        return Text(root=str(root), path=str(path), **changes)

    return settings


def test_a_build_that_fails_or_was_killed_begins_again(tmp_path, monkeypatch, small):
    folder = prepare(small(tmp_path / "whole"))
    (leftover := tmp_path / f".{folder.name}.unfinished").mkdir()
    for name in ("train-00000.bin", "val-00003.bin"):
        (leftover / name).write_bytes(b"left")
    with monkeypatch.context() as patch:
        patch.setattr(build_module, "refuse_empty_splits", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            prepare(small(tmp_path))
    assert not leftover.exists()
    leftover.mkdir()
    (leftover / "train-00000.bin").write_bytes(b"left")
    assert content(prepare(small(tmp_path))) == content(folder)
    assert not leftover.exists()


@pytest.fixture
def library():
    """The documents of the standard library, by name."""
    return {file.name: Path(file.path).read_bytes() for file in StandardLibrary().files}


def test_the_standard_library_becomes_its_documents_one_after_another(tmp_path, library):
    folder = prepare(StandardLibrary(root=str(tmp_path), val_fraction=0.1))
    expected = {"train": [], "val": []}
    for name, text in library.items():
        expected[split_of_name(name, 0.1, 0)].append(text + b"\0")
    for split, texts in expected.items():
        assert open_split(folder, split).tobytes() == b"".join(texts)


def test_the_index_describes_the_standard_library(tmp_path):
    index = load_index(prepare(StandardLibrary(root=str(tmp_path))))
    assert isinstance(from_dict(index.tokenizer), ByteTokenizer)
    assert index.fingerprints.keys() == {"source", "tokenizer", "settings"}
    for split in index.splits.values():
        assert split.tokens == split.text_bytes + split.documents > 50_000


def test_a_second_call_writes_and_prints_nothing(tmp_path, caplog, small):
    folder = prepare(small(tmp_path))
    before = [path.stat() for path in sorted(folder.iterdir())]
    with caplog.at_level(logging.INFO):
        assert prepare(small(tmp_path)) == folder
    assert [path.stat()[:9] for path in sorted(folder.iterdir())] == [s[:9] for s in before]
    assert not caplog.records


def test_a_build_reports_its_result_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        folder = prepare(StandardLibrary(root=str(tmp_path)))
    (line,) = caplog.messages
    pattern = r"prepared stdlib: [\d,]+ documents, [\d.]+ MB -> (\S+) \([\d,]+ train and [\d,]+ val"
    assert re.match(pattern, line)[1] == str(folder)


def test_invalid_utf8_is_counted_and_reported(corpus, tmp_path, caplog):
    (tmp_path / "texts" / "z").write_bytes(b"caf\xe9")
    with caplog.at_level(logging.INFO):
        folder = prepare(corpus())
    assert load_index(folder).invalid_documents == 1
    assert (
        "26 documents (1 not UTF-8: data.source.invalid_utf8=replace; fail says where)"
        in caplog.text
    )


@pytest.mark.parametrize("change", ["longer", "as long", "another file", "one less"])
def test_a_changed_corpus_is_prepared_in_another_folder(corpus, tmp_path, change):
    before = prepare(corpus())
    old = content(before)
    if change == "one less":
        (tmp_path / "texts" / "3.txt").unlink()
    else:
        name = {"longer": "0.txt", "as long": "1.txt", "another file": "x.txt"}[change]
        (tmp_path / "texts" / name).write_text("x" * (36_000 if change == "longer" else 9))
    after = prepare(corpus())
    assert after != before
    assert content(before) == old
    assert after == prepare(corpus())


def test_the_folder_is_named_for_its_source_under_the_root(tmp_path, small):
    folder = prepare(small(tmp_path / "a" / "b"))
    assert folder.parent == tmp_path / "a" / "b"
    assert re.fullmatch("text-[0-9a-f]{8}", folder.name)


def test_other_users_may_read_prepared_files(tmp_path, small):
    umask = os.umask(0o022)
    try:
        assert prepare(small(tmp_path)).stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)


def test_a_damaged_folder_is_rejected_and_unchanged(tmp_path, small):
    folder = prepare(small(tmp_path))
    with (folder / "train-00000.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"100 bytes, but its index says 980; delete"):
        prepare(small(tmp_path))
    assert (folder / "index.json").exists()


def test_verifying_finds_a_byte_that_changed(tmp_path, caplog, small):
    folder = prepare(small(tmp_path))
    with caplog.at_level(logging.INFO):
        prepare(small(tmp_path), verify=True)
    assert caplog.messages[0].startswith(f"verified text: 1 document, 0.0 MB -> {folder}")
    with (folder / "val-00000.bin").open("r+b") as file:
        file.write(b"xx")
    prepare(small(tmp_path))
    with pytest.raises(UserError, match=r"val-00000\.bin does not match its SHA-256"):
        prepare(small(tmp_path), verify=True)


def test_the_command_verifies_existing_files(command, tmp_path):
    (tmp_path / "text").write_text("some words " * 1000)
    words = ["prepare", "data=text", "data.source.path=text", f"data.root={tmp_path / 'data'}"]
    command(*words)
    assert command(*words).stdout.startswith("found text: ")
    assert command(*words, "--verify").stdout.startswith("verified text: ")
    (folder,) = prepared(tmp_path / "data")
    with (folder / "train-00000.bin").open("r+b") as file:
        file.write(b"xx")
    line = command(*words, "--verify", status=2).stderr
    assert "train-00000.bin does not match its SHA-256; delete the folder" in line
    assert line.count("\n") == 1


@pytest.mark.slow
def test_two_builds_at_once_make_one_folder(tmp_path, small):
    builds = [start(small(tmp_path, 30_000_000)) for _ in range(3)]
    outputs = {build.communicate()[0] for build in builds}
    assert [build.returncode for build in builds] == [0, 0, 0]
    (folder,) = prepared(tmp_path)
    assert outputs == {f"{folder}\n"}
    assert not [*tmp_path.glob(".*.unfinished")]


def test_named_tokens_are_opened_without_their_corpus(corpus):
    folder = prepare(corpus())
    named = corpus(fingerprint=load_index(folder).fingerprint)
    shutil.rmtree(named.path)
    assert prepare(named) == folder
    with pytest.raises(UserError):
        prepare(corpus())


def test_named_tokens_are_not_rebuilt_from_another_corpus(corpus):
    named = corpus(fingerprint="0" * 64)
    with pytest.raises(
        UserError, match=r"text-00000000 is missing, and the corpus or its tokenizer has changed"
    ):
        prepare(named)
    assert not Path(named.root).exists()
    folder = prepare(corpus())
    near = corpus(fingerprint=load_index(folder).fingerprint[:8] + "0" * 56)
    with pytest.raises(UserError, match="was prepared from other data"):
        prepare(near)


def test_a_missing_folder_is_named_also_if_the_corpus_is_away(corpus):
    named = corpus(fingerprint="0" * 64)
    shutil.rmtree(named.path)
    why = r"is missing, and cannot be prepared again \(data\.source\.path="
    line = rf"^{named.root}/text-00000000 {why}"
    with pytest.raises(UserError, match=line) as caught:
        prepare(named)
    assert str(caught.value).endswith("or start a new run with data.fingerprint=null")


LONG_NAMES = [
    "data.root={}",
    "tokenizer={}",
    "data.source.path={}",
    "data.source.val_path={}",
    "data=huggingface data.source.path={}",
]


@pytest.mark.parametrize("words", LONG_NAMES)
def test_a_name_that_is_too_long_is_one_line(command, tmp_path, words):
    (tmp_path / "text").write_text("some words " * 1000)
    given = words.format("a" * 300).split()
    line = command("prepare", "data=text", "data.source.path=text", *given, status=2).stderr
    assert "a" * 300 in line
    assert line.count("\n") == 1


@pytest.mark.parametrize("part", ["file", "file/below"])
def test_a_root_that_cannot_be_written_is_one_clear_line(tmp_path, part, small):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=r"data\.root=.*/file.* cannot be written \(.*set data.root"
    ):
        prepare(small(tmp_path / part))


def test_a_folder_without_write_permission_fails_in_one_clear_line(tmp_path, small):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        prepare(small(tmp_path))


@pytest.mark.parametrize("path", ["texts/logo.png", "texts/*.png"])
def test_a_binary_file_is_rejected_by_its_name(tmp_path, path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9)
    with pytest.raises(UserError, match=r"texts/logo.png is not text: it has NUL bytes; save it"):
        prepare(Text(root=str(tmp_path / "data"), path=str(tmp_path / path)))
    assert not [*tmp_path.glob("data/text-*")]


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "nothing.txt").touch()
    with pytest.raises(UserError, match=r"nothing.txt is empty; give it text to train on"):
        prepare(Text(root=str(tmp_path / "data"), path=str(tmp_path / "nothing.txt")))


@pytest.mark.parametrize(
    ("files", "held_out"), [(3, "the end of each file"), (30, "whole documents")]
)
def test_the_receipt_names_the_held_out_text(tmp_path, caplog, files, held_out):
    (tmp_path / "texts").mkdir()
    for number in range(files):
        (tmp_path / "texts" / f"{number}.txt").write_text("some words " * 20)
    caplog.set_level("INFO")
    data = Text(root=str(tmp_path / "data"), path=str(tmp_path / "texts"), val_fraction=0.4)
    prepare(data)
    assert f": {files} documents, " in caplog.text
    assert f" val tokens; val has {held_out})" in caplog.text
    caplog.clear()
    prepare(data, verify=True)
    assert f" val tokens; val has {held_out})" in caplog.text


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "val"), (1 - 1e-9, "train")])
def test_an_empty_split_is_rejected_and_leaves_nothing(tmp_path, fraction, split):
    config = StandardLibrary(root=str(tmp_path), val_fraction=fraction)
    with pytest.raises(UserError, match=f"no tokens for the {split} split of stdlib"):
        prepare(config)
    assert not [path for path in tmp_path.iterdir() if path.suffix not in (".lock", ".json")]


def test_a_corpus_without_a_path_fails_in_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"data\.source\.path is empty; set it to a file, a folder"):
        prepare(Text(root=str(tmp_path)))


def test_two_machines_prepare_the_same_bytes(tmp_path, small):
    first, second = prepare(small(tmp_path / "a")), prepare(small(tmp_path / "b"))
    assert first.name == second.name
    assert content(first) == content(second)
    assert json.loads(content(first)["index.json"])["format"] == 2


def test_a_data_module_without_a_source_prepares_nothing(command):
    target = "lightning.pytorch.demos.boring_classes.BoringDataModule"
    words = ["prepare", "~data", f"+data._target_={target}"]
    line = command(*words, status=2).stderr
    assert f"data._target_={target} has no source of tokens, so there is nothing to prep" in line


class Notes:
    """What ranks know of their run."""

    def __init__(self, file, local_rank=0, rank=None, force=False):
        self.file = file
        self.ranks = Ranks(local_rank if rank is None else rank, local_rank)
        self.force = force
        self.has_failed = False

    def check_peers(self):
        if self.has_failed:
            raise MeetingError("another rank has failed")

    def recall(self, name):
        return json.loads(self.file.read_text())[name] if self.file.exists() else None

    def remember(self, name, value):
        if self.ranks.rank == 0:
            unfinished = self.file.with_suffix(".new")
            unfinished.write_text(json.dumps({name: value}))
            unfinished.rename(self.file)


def test_a_run_keeps_its_tokens_without_a_look_at_the_corpus(corpus, tmp_path):
    run = Notes(tmp_path / "notes")
    folder = prepare_once(corpus(), run)
    shutil.rmtree(corpus().path)
    assert prepare_once(corpus(), run) == folder
    assert prepare_once(corpus(num_proc=2), run) == folder


def test_a_run_refuses_settings_that_give_other_tokens_unless_forced(corpus, tmp_path):
    run = Notes(tmp_path / "notes")
    folder = prepare_once(corpus(), run)
    line = rf"^data\.source\.val_fraction=0\.3 gives other tokens than {folder}, on which the run"
    with pytest.raises(UserError, match=line):
        prepare_once(corpus(val_fraction=0.3), run)
    forced = Notes(tmp_path / "notes", force=True)
    other = prepare_once(corpus(val_fraction=0.3), forced)
    assert other != folder
    assert prepare_once(corpus(val_fraction=0.3), run) == other
    with pytest.raises(UserError, match=r"^data\.source\.val_fraction=0\.4 gives other tokens"):
        prepare_once(corpus(), run)


def test_all_ranks_take_the_tokens_that_a_forced_start_names(corpus, tmp_path):
    notes = tmp_path / "notes"
    first = prepare_once(corpus(), Notes(notes))
    other = prepare(corpus(val_fraction=0.3))
    named = load_index(other).fingerprint
    forced = [Notes(notes, rank, force=True) for rank in (1, 0)]
    folders = [prepare_once(corpus(fingerprint=named), rank) for rank in forced]
    assert folders == [other, other] != [first, first]


@pytest.mark.parametrize("decided", [False, True])
def test_ranks_that_wait_end_with_the_one_that_prepares(corpus, tmp_path, decided):
    waiting = Notes(tmp_path / "notes", 1)
    if decided:
        marks = {"marks": corpus().marks(), "fingerprint": "e" * 64}
        Notes(tmp_path / "notes").remember("tokens", marks)
    waiting.has_failed = True
    with pytest.raises(MeetingError, match="has failed"):
        prepare_once(corpus(), waiting)


def test_a_corpus_that_has_moved_is_the_same_and_another_one_is_refused(corpus, tmp_path):
    run = Notes(tmp_path / "notes")
    folder = prepare_once(corpus(), run)
    moved = Path(corpus().path).rename(tmp_path / "moved")
    assert prepare_once(corpus(path=str(moved)), run) == folder
    (tmp_path / "other").mkdir()
    (tmp_path / "other/text").write_text("some words " * 1000)
    with pytest.raises(UserError, match=r"^data\.source\.path=.*other gives other tokens than"):
        prepare_once(corpus(path=str(tmp_path / "other")), run)


def test_ranks_of_a_machine_wait_for_the_one_that_prepares(corpus, tmp_path, monkeypatch):
    notes, built = tmp_path / "notes", []
    build = prepare_module.build.write

    def slowly(recipe, folder):
        built.append(folder)
        time.sleep(0.3)
        build(recipe, folder)

    monkeypatch.setattr(prepare_module.build, "write", slowly)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(prepare_once, corpus(), Notes(notes, rank)) for rank in (1, 2)]
        time.sleep(0.1)
        assert not any(rank.done() for rank in waiting)
        assert not built
        folder = prepare_once(corpus(), Notes(notes, 0))
        assert [rank.result(10) for rank in waiting] == [folder, folder]
    assert len(built) == 1


def test_another_machine_prepares_its_own_and_refuses_another_corpus(corpus, tmp_path):
    notes = tmp_path / "notes"
    folder = prepare_once(corpus(), Notes(notes))
    second = prepare_once(corpus(root=str(tmp_path / "second")), Notes(notes, 0, rank=2))
    assert content(second) == content(folder)
    notes.unlink()
    (Path(corpus().path) / "more").write_text("more")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(prepare_once, corpus(root=str(tmp_path / "third")), Notes(notes, 0, 2))
        time.sleep(0.3)
        (Path(corpus().path) / "more").unlink()
        prepare_once(corpus(), Notes(notes))
        with pytest.raises(UserError, match="has other tokens than the first machine's"):
            late.result(10)


def test_three_splits_are_prepared_and_named_in_the_receipt(corpus, caplog):
    caplog.set_level("INFO")
    folder = prepare(corpus(val_fraction=0.2, test_fraction=0.2))
    index = load_index(folder)
    counts = [f"{split.tokens:,} {name}" for name, split in index.splits.items()]
    assert f"({' and '.join(counts)} tokens; val has the end of each file)" in caplog.text
    assert ": 25 documents, " in caplog.text
    texts = [Path(corpus().path, f"{number}.txt").read_bytes() for number in range(25)]
    assert sum(split.text_bytes for split in index.splits.values()) == sum(map(len, texts))
