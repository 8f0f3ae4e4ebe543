import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lockstep_gpt.config import StdlibData, SyntheticData, UserError
from lockstep_gpt.data.corpora import open_corpus, split_of
from lockstep_gpt.data.prepare import prepare, remove_unfinished
from lockstep_gpt.data.shards import load_index, open_split
from lockstep_gpt.data.tokenizer import ByteTokenizer, from_dict

PREPARE = """
import sys
from lockstep_gpt.config import SyntheticData
from lockstep_gpt.data.prepare import prepare
print(prepare(SyntheticData(root=sys.argv[1], tokens=int(sys.argv[2]))))
"""


def small(root, **changes):
    return SyntheticData(**{"root": str(root), "vocab_size": 300, "tokens": 1000, **changes})


def start_build(root, tokens):
    command = [sys.executable, "-c", PREPARE, str(root), str(tokens)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_standard_library_becomes_its_documents_one_after_another(tmp_path):
    folder = prepare(StdlibData(root=str(tmp_path), val_fraction=0.1))
    expected = {"train": [], "val": []}
    for document in open_corpus(StdlibData()).documents():
        text = document.text.replace(b"\0", b" ") + b"\0"
        expected[split_of(document.name, 0.1)].append(text)
    for split, texts in expected.items():
        assert open_split(folder, split).tobytes() == b"".join(texts)


def test_the_index_describes_the_standard_library(tmp_path):
    index = load_index(prepare(StdlibData(root=str(tmp_path))))
    assert isinstance(from_dict(index.tokenizer), ByteTokenizer)
    for split in index.splits.values():
        assert split.tokens == split.text_bytes + split.documents > 50_000


def test_random_tokens_lie_below_the_vocabulary_in_both_splits(tmp_path):
    folder = prepare(small(tmp_path, val_fraction=0.1))
    train, val = open_split(folder, "train"), open_split(folder, "val")
    assert (train.size, val.size) == (900, 100)
    assert 250 < max(train.max(), val.max()) < 300


def test_a_second_time_nothing_is_written_or_said(tmp_path, caplog):
    folder = prepare(small(tmp_path))
    before = [path.stat() for path in sorted(folder.iterdir())]
    with caplog.at_level(logging.INFO):
        assert prepare(small(tmp_path)) == folder
    assert [path.stat()[:9] for path in sorted(folder.iterdir())] == [s[:9] for s in before]
    assert not caplog.records


def test_a_build_reports_what_it_made_in_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        folder = prepare(StdlibData(root=str(tmp_path)))
    (line,) = caplog.messages
    pattern = r"prepared stdlib: [\d,]+ files.*, [\d.]+ MB -> (\S+) \([\d,]+ train and [\d,]+ val"
    assert re.match(pattern, line)[1] == str(folder)


def test_settings_that_decide_the_tokens_give_another_folder(tmp_path):
    changes = [{}, {"val_fraction": 0.3}, {"vocab_size": 301}, {"tokens": 1001}]
    assert len({prepare(small(tmp_path, **change)) for change in changes}) == len(changes)


def test_other_settings_give_the_same_folder(tmp_path):
    changes = [{}, {"val_tokens": 5}, {"num_workers": 2}]
    assert len({prepare(small(tmp_path, **change)) for change in changes}) == 1


def test_the_folder_is_named_for_its_source_under_the_root(tmp_path):
    folder = prepare(small(tmp_path / "a" / "b"))
    assert folder.parent == tmp_path / "a" / "b"
    assert re.fullmatch("synthetic-[0-9a-f]{8}", folder.name)


def test_others_may_read_what_was_prepared(tmp_path):
    umask = os.umask(0o022)
    try:
        assert prepare(small(tmp_path)).stat().st_mode & 0o777 == 0o755
    finally:
        os.umask(umask)


def test_a_damaged_folder_is_refused_and_left_alone(tmp_path):
    folder = prepare(small(tmp_path))
    with (folder / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(UserError, match=r"100 bytes where its index says 1,960; delete"):
        prepare(small(tmp_path))
    assert (folder / "index.json").exists()


def test_a_killed_build_leaves_nothing_that_passes_for_finished(tmp_path):
    tokens = 30_000_000
    build = start_build(tmp_path, tokens)
    while not any(path.stat().st_size for path in tmp_path.glob(".*.tmp/train.bin")):
        assert build.poll() is None
        time.sleep(0.002)
    build.kill()
    assert build.wait() == -signal.SIGKILL
    build.stdout.close()
    (leftover,) = tmp_path.iterdir()
    assert not (leftover / "index.json").exists()
    folder = prepare(small(tmp_path, vocab_size=50_257, tokens=tokens))
    assert sum(split.tokens for split in load_index(folder).splits.values()) == tokens


def test_two_builds_at_once_both_end_well(tmp_path):
    builds = [start_build(tmp_path, 3_000_000) for _ in range(2)]
    outputs = {build.communicate()[0] for build in builds}
    assert [build.returncode for build in builds] == [0, 0]
    (folder,) = tmp_path.iterdir()
    assert outputs == {f"{folder}\n"}


def leftover(root, pid, idle, host=None):
    folder = root / f".stdlib-0123abcd.{host or socket.gethostname()}.{pid}.89abcdef.tmp"
    folder.mkdir()
    (folder / "train.bin").write_bytes(b"half")
    for path in (folder / "train.bin", folder):
        os.utime(path, (time.time() - idle,) * 2)
    return folder


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_dead_builds_are_removed(tmp_path, dead_pid):
    leftover(tmp_path, dead_pid, idle=120)
    leftover(tmp_path, os.getpid(), idle=100_000)
    leftover(tmp_path, 1, idle=100_000, host="another.host")
    remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_may_be_alive_or_is_not_ours_stays(tmp_path, dead_pid):
    kept = [
        leftover(tmp_path, os.getpid(), idle=120),
        leftover(tmp_path, dead_pid, idle=120, host="another.host"),
        leftover(tmp_path, dead_pid, idle=0),
    ]
    (foreign := tmp_path / ".mine.tmp").mkdir()
    os.utime(foreign, (0, 0))
    remove_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == {*kept, foreign}


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(UserError, match=r"data\.root=.* has no space left") as caught:
            prepare(small(tmp_path, tokens=100_000))
        assert caught.value.__cause__.errno == errno.ENOSPC
        assert not list(tmp_path.iterdir())
        prepare(small(tmp_path))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("part", ["file", "file/below"])
def test_a_root_that_cannot_be_written_is_one_clear_line(tmp_path, part):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        UserError, match=r"data\.root=.*/file.* cannot be written \(.*set data.root"
    ):
        prepare(small(tmp_path / part))


def test_a_folder_without_write_permission_is_one_clear_line(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        prepare(small(tmp_path))


@pytest.mark.parametrize(("fraction", "split"), [(1e-9, "val"), (1 - 1e-9, "train")])
def test_an_empty_split_is_refused_and_leaves_nothing(tmp_path, fraction, split):
    with pytest.raises(UserError, match=f"no tokens for the {split} split of synthetic"):
        prepare(small(tmp_path, val_fraction=fraction))
    assert not list(tmp_path.iterdir())


def test_the_parent_process_stays_free_of_torch():
    code = "import sys, lockstep_gpt.data.prepare; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False\n"


def test_two_machines_prepare_the_same_bytes(tmp_path):
    first, second = prepare(small(tmp_path / "a")), prepare(small(tmp_path / "b"))
    assert first.name == second.name
    assert load_index(first) == load_index(second)
    np.testing.assert_array_equal(open_split(first, "train"), open_split(second, "train"))
