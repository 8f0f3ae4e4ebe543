"""Two machines, rehearsed on one: two commands that meet at its loopback address."""

import socket

import torch

LIMIT = 240  # seconds


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_both(command, run, *overrides):
    """Start the commands of both machines; return their processes."""
    machines = ["trainer=cpu", "trainer.devices=1", "trainer.num_nodes=2", f"run_dir={run}"]
    machines += [f"launch.rdzv_endpoint=localhost:{free_port()}", *overrides]
    words = command.smoke(*machines)
    return [command.start(*words, f"launch.node_rank={node}") for node in (0, 1)]


def ended(processes):
    """Wait for all; return their exit statuses and outputs."""
    outputs = [process.communicate(timeout=LIMIT) for process in processes]
    return [process.returncode for process in processes], outputs


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
