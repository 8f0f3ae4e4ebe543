import contextlib
import errno
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import RunError, UserError
from lockstep.tokens import build
from lockstep.tokens.build import cut_to_index
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import (
    Split,
    SplitWriter,
    check_block_size,
    check_content,
    check_sizes,
    load_index,
    open_split,
)
from lockstep.tokens.sources import file_documents
from lockstep.tokens.sources.pretokenized import RandomTokens, TokenFiles
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import BytePairTokenizer, ByteTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

PREPARE = """
import sys
from lockstep.tokens.prepare import prepare
from lockstep.tokens.sources.pretokenized import *
from lockstep.tokens.sources.text import *
if __name__ == "__main__":
    print(prepare(eval(sys.argv[1])))
"""
MIB = 1 << 20


def small(root, **changes):
    return RandomTokens(**{"root": str(root), "vocab_size": 300, "tokens": 1000, **changes})


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


@pytest.mark.slow
def test_bpe_is_learnt_from_the_corpus_and_kept_with_it(corpus):
    folder = prepare(corpus(tokenizer="bpe", vocab_size=300))
    index = load_index(folder)
    tokenizer = from_dict(index.tokenizer)
    assert isinstance(tokenizer, BytePairTokenizer)
    assert tokenizer.vocab_size == index.tokenizer["vocab_size"] == 300
    as_bytes = prepare(corpus())
    for split in ("train", "val"):
        text = tokenizer.decode(open_split(folder, split))
        assert text == ByteTokenizer().decode(open_split(as_bytes, split))
        assert index.splits[split].tokens < load_index(as_bytes).splits[split].tokens * 0.6


def test_bpe_learns_from_no_more_than_the_first_training_text(corpus, tmp_path, monkeypatch):
    learnt = []
    monkeypatch.setattr(
        "lockstep.tokens.tokenizer_choice.make_tokenizer",
        lambda _name, _size, texts: learnt.append("".join(texts)) or ByteTokenizer(),
    )
    for number in range(80):
        (tmp_path / "texts" / f"b{number}").write_bytes(b"x" * 30_000)
    folder = prepare(corpus(tokenizer="bpe", tokenizer_mb=1))
    train = open_split(folder, "train").tobytes().replace(b"\0", b"")
    assert learnt == [train[:MIB].decode()]


def test_a_folder_of_tokens_has_the_tokenizer_that_it_learned(corpus, tmp_path):
    folder = prepare(corpus(tokenizer="bpe", vocab_size=300))
    again = prepare(corpus(tokenizer=str(folder), root=str(tmp_path / "again")))
    assert (again / "train-00000.bin").read_bytes() == (folder / "train-00000.bin").read_bytes()
    bytes_only = prepare(corpus(tokenizer="bytes"))
    with pytest.raises(UserError, match="is a folder without a tokenizer"):
        prepare(corpus(tokenizer=str(bytes_only)))


def test_files_stay_below_the_limit_and_contain_the_same_tokens(corpus):
    small, large = prepare(corpus(shard_mb=1)), prepare(corpus())
    assert max(path.stat().st_size for path in small.glob("*.bin")) == MIB
    assert len(load_index(small).shards) > len(load_index(large).shards) == 2
    for split in ("train", "val"):
        np.testing.assert_array_equal(open_split(small, split), open_split(large, split))


@pytest.mark.slow
def test_a_tokenizer_file_counts_by_its_content(corpus, tmp_path):
    index = load_index(prepare(corpus(tokenizer="bpe", vocab_size=300)))
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(index.tokenizer["json"])
    first, second = [prepare(corpus(tokenizer=str(tmp_path / f"{name}.json"))) for name in "ab"]
    assert first == second
    assert load_index(first).splits == index.splits
    (tmp_path / "b.json").write_text(index.tokenizer["json"] + " ")
    assert prepare(corpus(tokenizer=str(tmp_path / "b.json"))) != first


def test_invalid_utf8_is_counted_and_reported(corpus, tmp_path, caplog):
    (tmp_path / "texts" / "z").write_bytes(b"caf\xe9")
    with caplog.at_level(logging.INFO):
        folder = prepare(corpus(invalid_utf8="skip"))
    assert load_index(folder).invalid_documents == 1
    assert (
        "25 documents (1 not UTF-8: data.source.invalid_utf8=skip; fail says where)" in caplog.text
    )


@pytest.mark.slow
def test_settings_that_decide_the_tokens_give_another_folder(corpus):
    changes = [
        {},
        {"val_fraction": 0.45},
        {"shard_mb": 1},
        {"documents": "line"},
        {"invalid_utf8": "fail"},
        {"tokenizer": "bpe"},
        {"tokenizer": "bpe", "vocab_size": 300},
        {"tokenizer": "bpe", "tokenizer_mb": 3},
        {"test_fraction": 0.2},
        {"test_fraction": 0.3},
        {"val_path": corpus().path},
        {"test_path": corpus().path},
    ]
    assert len({prepare(corpus(**change)) for change in changes}) == len(changes)


def test_other_settings_give_the_same_folder(corpus):
    changes = [{}, {"num_proc": 2}, {"tokenizer_mb": 3}, {"test_fraction": 0.0}]
    assert len({prepare(corpus(**change)) for change in changes}) == 1


def test_a_corpus_that_changes_while_it_is_read_is_rejected(corpus, tmp_path, monkeypatch):
    read = file_documents.read_content

    def meddle(*arguments):
        (tmp_path / "texts" / "9.txt").write_text("changed meanwhile")
        return read(*arguments)

    monkeypatch.setattr(file_documents, "read_content", meddle)
    with pytest.raises(UserError, match="the corpus changed meanwhile"):
        prepare(corpus())
    assert not prepared(tmp_path / "data")


def killed_when(config, condition):
    """Start a build and kill it as soon as a condition is true."""
    build = start(config)
    while not condition():
        assert build.poll() is None, build.stderr.read()
        time.sleep(0.002)
    build.kill()
    build.communicate()
    assert build.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("quick_ranks")
def test_a_killed_build_resumes_and_gives_the_same_bytes(tmp_path, caplog):
    config = small(tmp_path, vocab_size=50_257, tokens=30_000_000, shard_mb=1)
    killed_when(config, lambda: len([*tmp_path.glob(".*/train*")]) > 12)
    assert not prepared(tmp_path)
    (unfinished,) = tmp_path.glob(".*.unfinished")
    full = {path: path.stat().st_mtime_ns for path in sorted(unfinished.glob("train*"))[:10]}
    with caplog.at_level(logging.INFO):
        folder = prepare(config)
    assert re.match(r"continuing after [\d,]+ tokens", caplog.messages[0])
    for path, written in full.items():
        assert (folder / path.name).stat().st_mtime_ns == written
    other = small(tmp_path / "whole", vocab_size=50_257, tokens=30_000_000, shard_mb=1)
    assert content(folder) == content(prepare(other))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_leftovers_of_a_killed_build_are_verified(tmp_path, caplog):
    config = small(tmp_path, vocab_size=50_257, tokens=30_000_000, shard_mb=1)
    killed_when(config, lambda: len([*tmp_path.glob(".*/train*")]) > 12)
    (file,) = tmp_path.glob(".*/train-00003.bin")
    with file.open("r+b") as damaged:
        damaged.write(b"x")
    with caplog.at_level(logging.INFO):
        folder = prepare(config)
    assert "train-00003.bin does not match its SHA-256; starting over" in caplog.text
    other = small(tmp_path / "whole", vocab_size=50_257, tokens=30_000_000, shard_mb=1)
    assert content(folder) == content(prepare(other))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_killed_build_of_text_resumes_with_its_tokenizer(corpus, tmp_path):
    for number in range(40):
        (tmp_path / "texts" / f"b{number}").write_text(f"{number} " * 20_000)
    settings = {"tokenizer": "bpe", "vocab_size": 258, "tokenizer_mb": 1}  # which learns at once
    settings |= {"shard_mb": 1, "num_proc": 2}
    config = corpus(**settings)
    killed_when(config, lambda: len([*(tmp_path / "data").glob(".*/train*")]) > 1)
    unbroken = finish(corpus(**settings | {"root": str(tmp_path / "whole"), "num_proc": 1}))
    assert content(finish(config)) == content(unbroken)


@pytest.fixture
def in_processes(corpus, tmp_path, wait_for):
    """A long build in two processes, and the ids of the processes."""
    for number in range(300):
        (tmp_path / "texts" / f"b{number}").write_text(f"{number} " * 20_000)
    settings = {"tokenizer": "bpe", "vocab_size": 258, "tokenizer_mb": 1}  # which learns at once
    build = start(corpus(**settings, shard_mb=1, num_proc=2))
    wait_for(lambda: len([*(tmp_path / "data").glob(".*/train*")]) > 1)
    children = Path(f"/proc/{build.pid}/task/{build.pid}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    yield build, [pid for pid, line in lines.items() if b"spawn_main" in line]
    build.kill()
    build.communicate()


@pytest.mark.slow
def test_killing_a_build_ends_its_processes(in_processes, wait_for, is_alive):
    build, workers = in_processes
    assert len(workers) == 2
    build.kill()
    wait_for(lambda: not any(map(is_alive, workers)))


@pytest.mark.slow
def test_a_killed_process_fails_in_one_clear_line(in_processes, tmp_path, kill):
    build, workers = in_processes
    kill(workers[0])
    assert "UserError: data.source.num_proc=2: a process was killed" in build.communicate()[1]
    assert [*(tmp_path / "data").glob(".*/index.json")]  # to resume from


@pytest.mark.usefixtures("quick_ranks")
def test_two_builds_at_once_make_one_folder(tmp_path):
    builds = [start(small(tmp_path, tokens=3_000_000)) for _ in range(3)]
    outputs = {build.communicate()[0] for build in builds}
    assert [build.returncode for build in builds] == [0, 0, 0]
    (folder,) = prepared(tmp_path)
    assert outputs == {f"{folder}\n"}
    assert not [*tmp_path.glob(".*.unfinished")]


@pytest.mark.parametrize(("days", "stays"), [(8, False), (6, True)])
def test_unfinished_builds_are_removed_after_a_week(tmp_path, days, stays):
    (leftover := tmp_path / ".text-0123abcd.unfinished").mkdir()
    (foreign := tmp_path / ".mine.unfinished").mkdir()
    for path in (leftover, foreign):
        os.utime(path, (time.time() - days * 86_400,) * 2)
    prepare(small(tmp_path))
    assert (leftover.exists(), foreign.exists()) == (stays, True)


@pytest.fixture
def tiny_disk(tmp_path):
    """A separate disk at `tmp_path / "disk"`; returns a function that makes it larger."""
    (disk := tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")

    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)

    yield disk, resize
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_fails_in_one_clear_line_without_leftovers(tiny_disk):
    disk, _ = tiny_disk
    with pytest.raises(RunError, match=r"data\.root=.* has no space left") as caught:
        prepare(small(disk, tokens=100_000))
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not [path for path in disk.iterdir() if path.suffix != ".lock"]
    prepare(small(disk))


def test_a_build_resumes_after_a_full_disk(tiny_disk, tmp_path, caplog):
    disk, resize = tiny_disk
    resize("6m")
    settings = {"vocab_size": 50_257, "tokens": 4_000_000, "shard_mb": 1}
    with pytest.raises(RunError, match="finished work is kept"):
        prepare(small(disk, **settings))
    resize("20m")
    with caplog.at_level(logging.INFO):
        folder = prepare(small(disk, **settings))
    assert "continuing after" in caplog.messages[0]
    assert content(folder) == content(prepare(small(tmp_path / "whole", **settings)))


@pytest.mark.parametrize(
    ("fractions", "line"),
    [
        ((1e-9, 0.0), r"val_fraction=1e-09 leaves no tokens for the val split of .*; raise it"),
        ((1 - 1e-9, 0.0), r"train split of synthetic; lower it"),
        ((0.1, 1e-9), r"test_fraction=1e-09 leaves no tokens for the test split of .*; raise it"),
        ((0.5, 0.5 - 1e-9), r"train split of synthetic; lower it"),
    ],
)
def test_an_empty_split_is_rejected_and_leaves_nothing(tmp_path, fractions, line):
    val, test = fractions
    with pytest.raises(UserError, match=line):
        prepare(small(tmp_path, val_fraction=val, test_fraction=test))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_corpus_without_text_is_rejected(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n\n")
    config = Text(root=str(tmp_path), path=str(path), documents="line")
    line = f"^data=text contains no text in data.source.path={path}; choose a corpus that does$"
    with pytest.raises(UserError, match=line):
        prepare(config)


def test_files_without_tokens_are_rejected(tmp_path):
    path = tmp_path / "empty.bin"
    path.touch()
    line = f"^data=shards contains no tokens in data.source.path={path}; choose a corpus that does$"
    with pytest.raises(UserError, match=line):
        prepare(TokenFiles(root=str(tmp_path), path=str(path)))


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_split_s_own_files_without_tokens_are_named(tmp_path, split):
    tokens, empty = tmp_path / "t.bin", tmp_path / "empty.bin"
    tokens.write_bytes(bytes(2000))
    empty.touch()
    named = f"data.source.{split}_path={empty}"
    with pytest.raises(UserError, match=f"^{named} leaves no tokens for the {split} split; give"):
        prepare(TokenFiles(root=str(tmp_path), path=str(tokens), **{f"{split}_path": str(empty)}))
    named = f"data.source.path={empty}"
    with pytest.raises(UserError, match=f"^{named} leaves no tokens for the train split; give"):
        prepare(TokenFiles(root=str(tmp_path), path=str(empty), val_path=str(tokens)))


def test_a_split_of_its_own_files_that_is_too_short_names_their_setting(tmp_path):
    for name, text in (("text", "some words " * 99), ("short", "x")):
        (tmp_path / name).write_text(text)
    paths = {"path": str(tmp_path / "text"), "root": str(tmp_path / "data")}
    for split, settings in (
        ("val", {"val_path": str(tmp_path / "short")}),
        ("test", {"test_path": str(tmp_path / "short"), "val_fraction": 0.5}),
    ):
        index = load_index(prepare(Text(**paths, **settings)))
        line = rf"the {split} split has 2; set at most 1, or .* \(data\.source\.{split}_path\)$"
        with pytest.raises(UserError, match=line):
            check_block_size(index, 64)
    swapped = {"path": paths["path"].replace("text", "short"), "val_path": paths["path"]}
    index = load_index(prepare(Text(**paths | swapped)))
    with pytest.raises(UserError, match=r"the train split has 2; .* give it more data$"):
        check_block_size(index, 64)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    code = PREPARE + "    print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    peaks = []
    for size in (60, 180):
        root = tmp_path / str(size)
        with (tmp_path / "a.txt").open("wb") as file:
            file.writelines([b"many words " * 100_000] * size)
        config = Text(root=str(root), path=str(tmp_path / "a.txt"))
        command = [sys.executable, "-c", code, repr(config)]
        peaks.append(int(subprocess.check_output(command).split()[1]))
    added = 120 * 1_100_000 / 1024
    assert peaks[1] - peaks[0] < added / 8  # the allocator keeps one or two extra pieces of 4 MB


LIMIT = 65_536  # bytes of a file


def written(folder, name, ids, dtype, split=None):
    """Write ids in pieces and return their index entry."""
    with contextlib.closing(SplitWriter(folder, name, dtype, LIMIT, split or Split())) as writer:
        for piece in np.array_split(np.asarray(ids).astype(dtype), 7):
            writer.append(piece)
        return writer.saved()


@pytest.mark.parametrize("done", [1, LIMIT // 2 - 1, LIMIT // 2, LIMIT // 2 + 1, 2 * LIMIT])
def test_a_writer_continues_at_the_index_s_position(tmp_path, done):
    ids = np.random.default_rng(0).integers(1000, size=2 * LIMIT + 9)
    (unbroken := tmp_path / "whole").mkdir()
    (killed := tmp_path / "killed").mkdir()
    saved = written(killed, "train", ids[:done], "<u2")
    written(killed, "train", np.zeros(LIMIT), "<u2", saved)  # never in an index
    expected = written(unbroken, "train", ids, "<u2")
    assert written(killed, "train", ids[done:], "<u2", saved) == expected
    for shard in expected.shards:
        assert (killed / shard.file).read_bytes() == (unbroken / shard.file).read_bytes()


def test_bytes_after_the_last_index_are_cut_off(tmp_path):
    folder = prepare(small(tmp_path))
    with (folder / "train-00000.bin").open("ab") as file:
        file.write(b"more")
    index = load_index(folder)
    with pytest.raises(UserError, match="1,964 bytes"):
        check_sizes(folder, index)
    cut_to_index(folder, index)
    check_content(folder, index)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_number_of_processes_does_not_change_the_bytes(corpus, tmp_path, tokenizer):
    folders = []
    for number in (1, 2, 3):
        root = str(tmp_path / f"{number}")
        folders.append(prepare(corpus(tokenizer=tokenizer, num_proc=number, root=root)))
    assert content(folders[0]) == content(folders[1]) == content(folders[2])


POOL = """
import resource, signal, sys
from pathlib import Path
from lockstep.tokens import build
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # semaphores are files in memory
build._make_pool(2, Path())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="semaphores are files only on Linux")
def test_a_system_without_semaphores_is_named_and_not_the_folder():
    words = [sys.executable, "-c", POOL]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    line = result.stderr.splitlines()[-1]
    assert "UserError: data.source.num_proc=2 needs semaphores, which the system refuses (" in line
    assert line.endswith("make /dev/shm writable, or set data.source.num_proc=1")


@pytest.mark.slow
def test_processes_send_whole_messages_or_none(corpus, tmp_path, monkeypatch):
    """POSIX doesn't split a write of up to PIPE_BUF bytes to a pipe, so a kill can't either."""
    for number in range(5):
        (tmp_path / "texts" / f"b{number}").write_text(f"{number} " * 300_000)
    sent, in_order = [], build._results_in_order

    def watched(*arguments):
        for result in in_order(*arguments):
            sent.append((len(pickle.dumps(result)), result.stat().st_size))
            yield result

    monkeypatch.setattr(build, "_results_in_order", watched)
    folder = prepare(corpus(num_proc=2))
    assert max(file for _, file in sent) > select.PIPE_BUF
    assert max(message for message, _ in sent) < select.PIPE_BUF - 256  # the pool's own bytes
    assert sorted(path.name for path in folder.iterdir()) == [
        *("index.json", "train-00000.bin", "val-00000.bin"),
    ]
