"""Ranks under the real torchrun: restarts after a kill, and a stop by a signal."""

import signal

import pytest

TORCHRUN = ["-m", "torch.distributed.run"]
LONG = ("trainer=cpu", "max_steps=60", "checkpoint.every=4", "log_every=5", "model.dropout=0.1")


@pytest.fixture
def torchrun(command):
    """Start the smoke experiment on two ranks of torchrun; all processes are forks."""

    def start(*overrides, options=()):
        words = [*TORCHRUN, "--nproc_per_node=2", *options, "-m", "lockstep_gpt"]
        words += command.smoke(*LONG, *overrides)
        return command.start_python(*words)

    return start


@pytest.fixture
def ranks_of(wait_for):
    """Return the processes of a launcher's ranks, once all are there."""

    def children(pid):
        listing = f"/proc/{pid}/task/{pid}/children"
        with open(listing) as file:  # noqa: PTH123 (not a file on a disk)
            return [int(word) for word in file.read().split()]

    def new(pid, before=()):
        pids = children(pid)
        return len(pids) == 2 and not {*pids} & {*before} and pids

    return lambda pid, before=(): wait_for(lambda: new(pid, before))


@pytest.fixture(scope="module")
def undisturbed(finished, tmp_path_factory):
    """The summary of the undisturbed run."""
    command = finished[0].elsewhere(tmp_path_factory.mktemp("whole"))
    command.train(*LONG, "trainer.devices=2", "strategy=ddp", "run_dir=whole")
    return command.summary("whole")


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--standalone",)], ids=["default", "standalone"])
def test_a_killed_rank_restarts_and_ends_with_the_bits_of_an_undisturbed_run(
    undisturbed, command, torchrun, ranks_of, wait_for_checkpoint, kill, options
):
    hurt = ("run_dir=hurt", "resume=auto")
    process = torchrun(*hurt, options=(*options, "--max-restarts=2"))
    ranks = []
    for _ in range(2):
        wait_for_checkpoint(command.folder / "hurt")
        ranks = ranks_of(process.pid, ranks)
        kill(ranks[1])
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, f"{out}\n{err}"
    ended = command.summary("hurt")
    assert ended["status"] == "done"
    assert ended["weights"]["60"] == undisturbed["weights"]["60"]


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_and_the_run_continues(command, torchrun, wait_for_checkpoint):
    process = torchrun("max_steps=99999", "run_dir=run")
    wait_for_checkpoint(command.folder / "run")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    summary = command.summary("run")
    assert (summary["status"], summary["saved"]) == ("stopped", True)
    step = summary["step"]
    command("train", "run_dir=run", "resume=auto", f"max_steps={step + 4}", "launch.inline=true")
    assert command.summary("run")["step"] == step + 4
