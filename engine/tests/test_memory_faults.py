"""A machine whose shared memory is too small, read-only, or missing: one line, then disk alone."""

import os

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount of its own")

# The command with another /dev/shm, which only its own processes see.
ELSEWHERE = """
import ctypes, os
import lockstep_gpt
from lockstep import commands as cli
MOUNTS, PRIVATE, READ_ONLY = 0x20000, 0x44000, 1  # CLONE_NEWNS, MS_REC | MS_PRIVATE, MS_RDONLY
library = ctypes.CDLL(None, use_errno=True)
def call(function, *words):
    if getattr(library, function)(*words):
        raise OSError(ctypes.get_errno(), function)
def main(words):
    flags = READ_ONLY if os.environ["SHM"] == "ro" else 0
    options = None if flags else os.environ["SHM"].encode()
    call("unshare", MOUNTS)
    call("mount", b"none", b"/", None, PRIVATE, None)
    call("mount", b"none", b"/dev/shm", b"tmpfs", flags, options)
    return cli.main(words)
"""


@pytest.fixture
def train(command):
    """Return a function that trains two ranks with another /dev/shm; returns what they printed."""
    (command.folder / "elsewhere.py").write_text(ELSEWHERE)

    def run(shm, *words):
        words = command.smoke("trainer=cpu", "trainer.devices=2", "run_dir=run", *words)
        environment = {"PYTHONPATH": str(command.folder), "SHM": shm}
        process = command.start(*words, target="elsewhere:main", **environment)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out + err

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shm", "line"),
    [
        ("size=700k", "need more than half of the"),
        ("ro", "cannot be made (Read-only file system)"),
    ],
)
def test_without_shared_memory_the_receipt_says_so_once(train, shm, line):
    printed = train(shm)
    assert printed.count(line) == 1
    assert printed.count("memory  ") == 1
    assert "Traceback" not in printed


# Before step 9, once: something else fills the memory, and the state grows.
FILLS = """
import lightning, os, torch
class Fills(lightning.Callback):
    state = 0
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 9 and trainer.is_global_zero:
            status = os.statvfs("/dev/shm")
            assert status.f_blocks * status.f_frsize < 1 << 23, "this is the memory of the machine"
            self.state = 1_000_000
            with open("/dev/shm/other", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError:
                    pass
    def state_dict(self):
        return {"grown": torch.zeros(self.state)}
"""


@pytest.mark.slow
def test_a_number_takes_all_that_is_left_in_shared_memory(train):
    assert "memory     the newest state, every 3 steps" in train("size=1m", "memory=3")
    assert "off: /dev/shm has no room for" in train("size=100k", "memory=3", "run_dir=other")


@pytest.mark.slow
def test_memory_that_fills_up_later_is_one_line(train, command):
    (command.folder / "fills.py").write_text(FILLS)
    node = "+callbacks.fills._target_=fills.Fills"
    printed = train("size=3m", node, "memory=3", "checkpoint.every=100")
    line = "the state isn't kept in memory any more: /dev/shm has no room for"
    assert printed.count(line) == 1
    assert "done in" in printed
