import re
import socket
from dataclasses import replace

import pytest

from lockstep_gpt.run import remedies
from lockstep_gpt.run.remedies import Scene, explain, explain_death

BREAKER = """
import os, signal
import lightning, torch

class Allocate(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        torch.empty(1 << 50)

class Unused(lightning.Callback):
    def setup(self, trainer, module, stage):
        module.model.spare = torch.nn.Linear(3, 3)

class UnusedLater(Unused):
    def on_train_start(self, trainer, module):
        model = module.model
        add = lambda _model, _inputs, loss: loss + sum(model.spare(torch.ones(3)))
        self.hook = model.register_forward_hook(add)

    def on_train_batch_start(self, trainer, module, *_):
        if trainer.global_step == 2:
            self.hook.remove()

class Differ(lightning.Callback):
    def setup(self, trainer, module, stage):
        module.model.spare = torch.nn.Linear(3, 3 + trainer.global_rank)

class Alone(lightning.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero and trainer.global_step == 3:
            trainer.strategy.barrier()

class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        os.kill(os.getpid(), signal.SIGKILL)
"""
# Output of torch, NCCL, and Linux that can't be provoked here: many or broken GPUs, long waits.
RECORDED = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total": (
        "one micro-batch needs more memory"
    ),
    "DataLoader worker (pid 4242) is killed by signal: Bus error. It is possible that": "/dev/shm",
    "RuntimeError: unable to write to file </torch_42_1>: No space left on device (28)": "/dev/shm",
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE,": (
        "joined an all-reduce late"
    ),
    "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation": (
        "joined an all-reduce late"
    ),
    "Error while creating shared memory segment /dev/shm/nccl-5gN8 (size 9637888)": (
        "/dev/shm is too small"
    ),
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000": "use the same GPU",
    "CUDA error: an illegal memory access was encountered": "wrote memory outside its tensors",
    "ncclUnhandledCudaError: Call to CUDA function failed.": "failed inside NCCL",
    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!": "given a CPU tensor",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed": (
        "could not set up or keep a connection"
    ),
    "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2": (
        "not all ranks reached"
    ),
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running": (
        "different shapes"
    ),
    "CUDA error: no kernel image is available for execution on the device": "not support the GPU",
    "CUDA error: device-side assert triggered": "index out of range",
    "CUDA error: uncorrectable ECC error encountered": "is broken",
    "OSError: [Errno 24] Too many open files": "may not open more files",
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


def test_an_out_of_memory_error_names_the_next_micro_batch(broken):
    output = broken("Allocate", "batch.global_size=8")
    assert output.startswith("cause   one micro-batch needs more memory than a device has\n")
    assert "batch.micro_size=4 (2 micro-batches per step; nothing else" in output
    assert output.index("remedy") < output.index("Traceback")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause", "remedy"),
    [
        (
            "Unused",
            "do not affect the loss",
            r"\(spare\.weight, spare\.bias\), or set strategy\.find",
        ),
        (
            "UnusedLater",
            "do not affect the loss",
            r"\(spare\.weight, spare\.bias\), or set strategy\.find",
        ),
        ("Differ", "different shapes", "the same code, settings, and packages"),
    ],
)
def test_models_that_ddp_cannot_average_are_explained(broken, name, cause, remedy):
    output = broken(name, "trainer=cpu", "trainer.devices=2")
    first, second = output.splitlines()[:2]
    assert cause in first
    assert re.search(remedy, second)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_a_metric_that_nothing_logs_is_answered_with_those_that_are_logged(command, kind):
    target = f"+callbacks.own._target_=lightning.pytorch.callbacks.{kind}"
    words = (target, "+callbacks.own.monitor=val/accuracy", "launch.inline=true", "run_dir=run")
    line = command.train(*words, status=1).stderr.splitlines()[-1]
    assert "a callback monitors a metric that nothing logs; replace val/accuracy with one" in line
    assert {"train/loss", "val/loss"} <= {*re.split("[ ,;]+", line)}


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


def test_a_used_port_is_explained(command):
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing, but reveals our own address
        address = probe.getsockname()[0]
    with socket.create_server(("0.0.0.0", 0)) as taken:
        place = f"{address}:{taken.getsockname()[1]}"
        nodes = ("trainer.num_nodes=2", "launch.node_rank=0", "launch.join_seconds=20")
        words = (*nodes, f"launch.rdzv_endpoint={place}", "run_dir=run", "trainer=cpu")
        output = command.train(*words, status=1).stderr
    assert "address already in use" in output
    assert "cause   another process" in output


@pytest.mark.parametrize(("text", "cause"), RECORDED.items())
def test_recorded_failures_are_recognized_by_their_text(composed, text, cause):
    assert cause in explain(f"some lines\n{text}\nmore", Scene(composed(), 2))


def test_cause_and_remedy_fit_on_one_line(composed):
    explanation = explain("Expected to have finished reduction", Scene(composed(), 2, ["head"]))
    assert remedies.in_one_line(explanation) == (
        "parts of the model do not affect the loss, so DDP waits for their gradients; use every "
        "parameter in the loss (head), or set strategy.find_unused_parameters=true"
    )


def test_every_failure_of_the_table_is_among_the_tested():
    provoked = ["can't allocate memory", "SemLock", "did not receive grad", "EADDRINUSE"]
    provoked.append("could not find the monitored key")
    tested = [*RECORDED, *provoked]
    known = [any(re.search(entry.pattern, text) for text in tested) for entry in remedies.ENTRIES]
    assert all(known)


@pytest.mark.parametrize(
    "text",
    ["ValueError: something else", 'File "/dev/shm/project/src/own.py", line 7\nZeroDivisionError'],
)
def test_an_unknown_failure_has_no_explanation(composed, text):
    assert explain(text, Scene(composed(), 1)) == ""


def test_a_death_is_explained_by_its_log_or_its_signal(composed):
    scene = Scene(composed(), 2)
    assert "joined an all-reduce late" in explain_death(
        6, "Watchdog caught collective operation timeout", scene
    )
    assert "watchdog" in explain_death(6, "", scene)
    assert explain_death(3, "", scene) == ""
    assert all(explain_death(signum, "", scene) for signum in remedies.SIGNALS)


def test_no_smaller_batch_is_suggested_for_one_sample(composed):
    config = composed("batch.global_size=2", "precision=bf16-mixed")
    config.model = replace(config.model, activation_checkpointing=True)
    assert "more memory" in explain("CUDA out of memory", Scene(config, 2))
