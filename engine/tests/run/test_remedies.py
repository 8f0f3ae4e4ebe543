import re

import pytest

from lockstep.run import remedies
from lockstep.run.remedies import explain, explain_death

BREAKER = """
import os, signal
import lightning, torch

class Allocate(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        torch.empty(1 << 50)

class Alone(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step == 3:
            trainer.strategy.barrier()

class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        os.kill(os.getpid(), signal.SIGKILL)
"""
# Output of torch, NCCL, and gloo that can't be provoked here: many GPUs, long waits.
RECORDED = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": (
        "one micro-batch needs more memory"
    ),
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE,": (
        "joined an all-reduce late"
    ),
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation": (
        "joined an all-reduce late"
    ),
    "RuntimeError: Early stopping conditioned on metric `val_loss` which is not available. Pass": (
        "EarlyStopping monitors val_loss, which nothing logs"
    ),
}


@pytest.fixture
def broken(command):
    """Train with a callback that breaks something; return the terminal output."""
    (command.folder / "breaker.py").write_text(BREAKER)

    def train(name, *words):
        callback = f"+callbacks.breaker._target_=breaker.{name}"
        done = command.train(callback, *words, status=1, PYTHONPATH=str(command.folder))
        return done.stderr

    return train


def test_an_out_of_memory_error_names_what_uses_less(broken):
    output = broken("Allocate", "batch.global_size=8")
    assert output.startswith("cause   one micro-batch needs more memory than a device has\n")
    assert "\nremedy  lower batch.micro_size, which changes nothing else; or " in output
    assert output.index("remedy") < output.index("Traceback")


@pytest.mark.slow
def test_a_barrier_on_rank_0_alone_is_shown_with_where_each_rank_waited(broken):
    settings = ("strategy.timeout_seconds=5", "launch.max_restarts=0")
    output = broken("Alone", "trainer=cpu", "trainer.devices=2", *settings)
    cause, _, where = output.splitlines()[-4:-1]
    assert "such as a barrier below `if trainer.is_global_zero`" in cause
    # The barrier may be answered by rank 1's next all-reduce, so the place may be a later one.
    place = r"rank \d at \S+\.py:\d+, in \w+; "
    assert re.fullmatch(rf"where   waited in vain: ({place})+the cause is there or before", where)


def test_a_kill_from_outside_is_explained_after_the_last_restart(broken):
    output = broken("Kill", "launch.max_restarts=0")
    cause, remedy, line = output.splitlines()[-3:]
    assert cause.startswith("cause   killed from outside")
    assert "dmesg" in remedy
    assert line.startswith("rank 0 was killed by SIGKILL; no restarts are left; nothing is saved")


@pytest.mark.parametrize(("text", "cause"), RECORDED.items())
def test_recorded_failures_are_recognized_by_their_text(text, cause):
    assert cause in explain(f"some lines\n{text}\nmore")


def test_cause_and_remedy_fit_on_one_line():
    line = remedies.in_one_line(explain("CUDA out of memory"))
    cause = "one micro-batch needs more memory than a device has"
    assert line == f"{cause}; {remedies.LESS_MEMORY}"


@pytest.mark.parametrize(
    "text",
    ["ValueError: something else", 'File "/dev/shm/project/src/own.py", line 7\nZeroDivisionError'],
)
def test_an_unknown_failure_has_no_explanation(text):
    assert explain(text) == ""


def test_a_death_is_explained_by_its_log_or_its_signal():
    watchdog = "Watchdog caught collective operation timeout"
    assert "joined an all-reduce late" in explain_death(6, watchdog)
    assert "when memory ran out" in explain_death(9, "")
    assert explain_death(11, "") == ""
