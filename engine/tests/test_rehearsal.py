"""Two machines, rehearsed on one: two commands that meet at its loopback address."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
import torch

from lockstep.checkpoints.reading import newest_verified
from lockstep.stop_signals import REPEAT_SECONDS

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


def start_both(command, run, *overrides, expected=2, **environment):
    """Start the commands of both machines, of as many as are `expected`; return their processes."""
    nodes = f"trainer.num_nodes={expected}"
    machines = ["trainer=cpu", "trainer.devices=1", nodes, f"run_dir={run}"]
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


@pytest.mark.slow
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


LOST = 3  # seconds


def only_process(processes_of, run, program, last_word):
    """Return the process of the run that runs `program` with `last_word` before the function."""
    lines = {}
    for pid in processes_of(run):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")
        lines[pid] = " ".join(words[:-1])
    (pid,) = (
        pid for pid, line in lines.items() if program in line and line.endswith(f" {last_word}")
    )
    return pid


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_machines_meet_again_if_one_stood_still_while_they_met(
    command, processes_of, is_alive, kill, wait_for, wait_for_checkpoint
):
    run = command.folder / "run"
    command.python = None  # SIGSTOP would stop the `python` of a fork, not the fork
    machines = start_both(command, run, *LONG, f"launch.lost_seconds={LOST}")
    wait_for_checkpoint(run)
    agents = [only_process(processes_of, run, "agent_program", node) for node in (0, 1)]
    ranks = [only_process(processes_of, run, "rank_program", agent) for agent in agents]
    os.kill(ranks[1], signal.SIGSTOP)  # so machine 1 comes seconds later than machine 0
    kill(ranks[0])
    wait_for(lambda: not is_alive(ranks[1]))
    time.sleep(0.7)  # machine 1 has joined, and looks each second whether machine 0 has
    os.kill(agents[1], signal.SIGSTOP)
    time.sleep(2 * LOST)
    os.kill(agents[1], signal.SIGCONT)
    log = run / "train.log"

    def continues():
        assert all(machine.poll() is None for machine in machines), ended(machines)
        return "continues from step" in log.read_text()

    wait_for(continues)
    for machine in machines:
        machine.terminate()
    statuses, outputs = ended(machines)
    assert statuses == [143, 143], outputs


def connected_agents(processes_of, run, port):
    """Return how many agents of the run are connected to a port of this machine."""
    lines = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")).splitlines()
    rows = [line.split() for line in lines]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[2].endswith(f":{port:04X}")}
    count = 0
    for pid in processes_of(run):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
            is_agent = b"agent_program" in Path(f"/proc/{pid}/cmdline").read_bytes()
            count += is_agent and bool(files & sockets)
    return count


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_before_all_machines_meet_ends_those_that_wait(
    command, processes_of, wait_for, node
):
    run = command.folder / "run"
    command.python = None  # the files of a fork are not those of its `python`
    port = free_port()
    place = f"launch.rdzv_endpoint=127.0.0.1:{port}"
    machines = start_both(command, run, *LONG, place, "batch.global_size=9", expected=3)

    wait_for(lambda: connected_agents(processes_of, run, port) == 2)
    time.sleep(2)
    machines[node].send_signal(signal.SIGINT)
    started = time.monotonic()
    statuses, outputs = ended(machines)
    assert time.monotonic() - started < STOP_SECONDS
    assert statuses[node] == 130, outputs
    first, second = (out + err for out, err in outputs)
    if node == 0:
        assert statuses[1] == 1, outputs
        assert "machine 0, where all machines meet, has ended" in second
    else:
        assert statuses[0] == 130, outputs
        assert "stopped by SIGINT before the first step" in first
        assert "stopped by SIGINT before all machines met" in second
