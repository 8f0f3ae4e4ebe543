"""Two machines, rehearsed on one: two commands that meet at its loopback address."""

import re
import signal
import socket
import time

import pytest
import torch

from lockstep_gpt.run.checkpoint import newest_verified
from lockstep_gpt.stop_signals import REPEAT_SECONDS

LIMIT = 240  # seconds
HANGING = """
import os, time, lightning
class Hanging(lightning.Callback):
    def on_train_batch_start(self, *_):
        while os.path.exists("hang"):
            time.sleep(0.1)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_both(command, run, *overrides, **environment):
    """Start the commands of both machines; return their processes."""
    machines = ["trainer=cpu", "trainer.devices=1", "trainer.num_nodes=2", f"run_dir={run}"]
    machines += [f"launch.rdzv_endpoint=localhost:{free_port()}", *overrides]
    words = command.smoke(*machines)
    ranks = [f"launch.node_rank={node}" for node in (0, 1)]
    return [command.start(*words, rank, **environment) for rank in ranks]


def ended(processes):
    """Wait for all; return their exit statuses and outputs."""
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    return [process.returncode for process in processes], outputs


@pytest.mark.slow
def test_two_commands_at_a_loopback_address_give_the_weights_of_two_ranks(two):
    command, _ = two
    statuses, outputs = ended(start_both(command, "runs/rehearsal"))
    assert statuses == [0, 0], outputs
    assert "1 device x 2 nodes" in (command.folder / "runs/rehearsal/train.log").read_text()
    folders = [command.folder / f"runs/{name}/checkpoints" for name in ("rehearsal", "two")]
    ours, theirs = (torch.load(folder / "step=000020.ckpt")["state_dict"] for folder in folders)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_machine_that_does_not_come_is_explained(command):
    words = command.smoke("trainer=cpu", "trainer.devices=1", "trainer.num_nodes=2", "run_dir=run")
    words += [f"launch.rdzv_endpoint=localhost:{free_port()}", "launch.join_seconds=3"]
    status, out, err = command.run(*words)
    assert status != 0
    assert "this address is for commands on one machine" in out + err


LONG = ("max_steps=100000", "val_every=100000", "checkpoint.every=20", "launch.join_seconds=100")
GRACE = 5  # seconds
STOP_SECONDS = 15  # a machine that waits for one that is gone would take `launch.join_seconds`


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_ctrl_c_on_one_machine_ends_both_after_a_save(command, wait_for_checkpoint, node):
    run = command.folder / "run"
    machines = start_both(command, "run", *LONG)
    wait_for_checkpoint(run)
    machines[node].send_signal(signal.SIGINT)
    started = time.monotonic()
    statuses, outputs = ended(machines)
    assert time.monotonic() - started < STOP_SECONDS
    assert statuses == [130, 130], outputs
    assert command.summary("run")["saved"]
    newest = max((run / "checkpoints").glob("*.ckpt"))
    assert newest_verified(run / "checkpoints").path == newest
    step = torch.load(newest)["global_step"]
    for number, (out, err) in enumerate(outputs):
        (last,) = re.findall(r"^stopped by .+", out + err, flags=re.MULTILINE)
        assert f"; step {step} is saved; to continue on all machines" in last
        has_rank_zero = "  schedule   " in out  # either machine may; its line is for all
        assert last.endswith(" launch.node_rank=1") == (number == 1 and not has_rank_zero)
        assert "restarting" not in out + err


@pytest.mark.slow
def test_a_second_ctrl_c_on_one_machine_ends_the_other_too(command, wait_for_checkpoint):
    (command.folder / "hanging.py").write_text(HANGING)
    hang = "+callbacks.hanging._target_=hanging.Hanging"
    words = (*LONG, hang, f"launch.grace_seconds={GRACE}")  # the other's rank hangs, too
    machines = start_both(command, "run", *words, PYTHONPATH=str(command.folder))
    wait_for_checkpoint(command.folder / "run")
    (command.folder / "hang").touch()
    for _ in range(2):
        time.sleep(2 * REPEAT_SECONDS)
        machines[1].send_signal(signal.SIGINT)
    started = time.monotonic()
    statuses, outputs = ended(machines)
    assert time.monotonic() - started < STOP_SECONDS + GRACE
    assert statuses == [130, 130], outputs
    for out, err in outputs:
        assert re.search(
            r"stopped by SIGINT .*before all ranks saved; step \d+ is saved", out + err
        )
