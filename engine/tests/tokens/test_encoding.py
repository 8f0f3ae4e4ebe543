"""Blocks are tokenized in any number of processes, and come in order."""

import pickle
import select
import subprocess
import sys

import pytest

from lockstep.tokens import encoding
from lockstep.tokens.prepare import prepare


def content(folder):
    """Return the content of a prepared folder, by file name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


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
from lockstep.tokens import encoding
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # semaphores are files in memory
encoding._make_pool(2, Path())
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
    sent, in_order = [], encoding._results_in_order

    def watched(*arguments):
        for result in in_order(*arguments):
            sent.append((len(pickle.dumps(result)), result.stat().st_size))
            yield result

    monkeypatch.setattr(encoding, "_results_in_order", watched)
    folder = prepare(corpus(num_proc=2))
    assert max(file for _, file in sent) > select.PIPE_BUF
    assert max(message for message, _ in sent) < select.PIPE_BUF - 256  # the pool's own bytes
    assert sorted(path.name for path in folder.iterdir()) == [
        *("index.json", "train-00000.bin", "val-00000.bin"),
    ]
