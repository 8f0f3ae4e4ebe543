"""One of several machines: what it needs and waits for; tests of two are elsewhere."""

import threading
import time

import pytest

from lockstep.errors import RunError, UserError
from lockstep.launch import machines, meeting, start
from lockstep.launch.devices import spread_batches
from lockstep.launch.machines import rendezvous_parameters
from lockstep.launch.placement import Launch, Placement
from lockstep.launch.start import NewRun
from lockstep.ranks import waiting
from lockstep.run.directory import RunDirectory

VALUES = {
    "max_steps": 3,
    "batch": {"global_size": 8},
    "model": {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8},
    "data": {"_target_": "lockstep.tokens.sources.text.StandardLibrary"},
    "optim": {"algorithm": "adamw"},
    "trainer": {"num_nodes": 2, "devices": 1, "accelerator": "cpu"},
}
PLACE = "10.0.0.1:29500"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory that this machine, number 1 of 2, shares with the first."""
    monkeypatch.setattr(machines, "own_address", lambda _: ("10.0.0.2", "eth7"))
    monkeypatch.setattr(
        start.supervise, "supervise", lambda _, _function, node_rank=0: 40 + node_rank
    )
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunDirectory(tmp_path / "run")


def start_machine(run, values, *, is_named=True):
    """Start this machine's part of the run; return its exit status."""
    return start.start(NewRun(run, values, "a:b", dict, is_named=is_named))


def test_the_directory_is_locked_before_anything_is_written_there(run):
    # Else of two commands in one second, one removes what the other has written.
    locked = []

    def prepare(values):
        locked.append(run.lock.path.exists())
        return values

    new = NewRun(run, {**VALUES, "trainer": {**VALUES["trainer"], "num_nodes": 1}}, "a:b", prepare)
    start.start(new)
    assert locked == [True]


def settings_of(node_rank=1, join_seconds=0.3, rdzv_endpoint=PLACE):
    given = {"node_rank": node_rank, "join_seconds": join_seconds}
    return {**given, "rdzv_endpoint": rdzv_endpoint, "min_nodes": 1}


def values_of(**settings):
    """Return the values of a machine that has these settings of `launch`."""
    return {**VALUES, "launch": settings_of(**settings)}


def launch_of(**settings):
    return Launch.of(values_of(**settings))


@pytest.mark.parametrize(
    ("settings", "is_named", "line"),
    [
        ({}, False, "run_dir=null with trainer.num_nodes=2; set it to the same folder on all"),
        (
            {"rdzv_endpoint": None},
            True,
            "launch.rdzv_endpoint=null with trainer.num_nodes=2; set it to the same HOST:PORT of "
            "machine 0 on all",
        ),
        ({"node_rank": 2}, True, "launch.node_rank=2 must be from 0 to 1"),
    ],
)
def test_settings_that_all_machines_need_are_required(run, settings, is_named, line):
    with pytest.raises(UserError, match=line):
        start_machine(run, values_of(**settings), is_named=is_named)


def test_a_port_of_another_program_is_named_as_that():
    cause = "The server socket has failed to listen. port: 29500, code: -98, name: EADDRINUSE"
    line = machines.explain_missed_rendezvous(launch_of(), cause, is_lost=True)
    assert line == (
        f"another program listens at {PLACE}; end it, or give all machines a free port in "
        "launch.rdzv_endpoint"
    )


def test_a_batch_that_fewer_machines_cannot_divide_is_rejected_at_the_start():
    values = {"batch": {"_target_": "lockstep.Batch", "micro_size": 1, "global_size": 4}}
    four = Placement("cpu", 1, 4)
    spread_batches(values, four, None)
    with pytest.raises(UserError, match=r"global_size=4 is not divisible by batch\.micro.* 3 node"):
        spread_batches(values, four, 2)


def test_the_first_machine_freezes_the_run_and_the_others_read_it(run):
    values = values_of(node_rank=0)
    assert start_machine(run, values) == 40
    assert run.values() == values
    assert start_machine(run, values_of()) == 41  # settings of one machine may differ


def test_a_machine_that_times_out_or_has_other_settings_gets_the_reason(run):
    with pytest.raises(RunError, match=r"after 0\.3 s it lacks config\.yaml"):
        start_machine(run, values_of())
    run.create(values_of())
    with pytest.raises(UserError, match=r"a different configuration.*: max_steps=4 instead of 3"):
        start_machine(run, {**values_of(), "max_steps": 4})


def test_a_machine_says_once_that_it_waits_for_the_first_and_how_long(run, monkeypatch, capsys):
    monkeypatch.setattr(machines, "HINT_SECONDS", 0.05)
    with pytest.raises(RunError):
        start_machine(run, values_of(join_seconds=0.5))
    limit = "at most launch.join_seconds=0.5 s"
    assert capsys.readouterr().err == (
        f"waiting for machine 0, {limit}: run_dir={run.path} lacks config.yaml; check that all "
        "machines share it, and that machine 0 has started\n"
    )


def test_an_agent_says_where_it_waits_only_if_others_are_late(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "HINT_SECONDS", 0.05)
    meeting.meet(lambda: None, launch_of())
    assert capsys.readouterr().err == ""
    meeting.meet(lambda: time.sleep(0.5), launch_of())
    place = f"launch.rdzv_endpoint={PLACE}, at most launch.join_seconds=0.3 s"
    line = f"waiting until 2 machines meet at {place}; start the same command on each"
    assert capsys.readouterr().err.startswith(line)


def test_a_machine_waits_for_the_first_machine_s_current_endpoint(run):
    before = values_of(rdzv_endpoint="10.0.0.9:29500")
    run.create(before)  # by a start with another first machine
    with pytest.raises(UserError, match=f"launch.rdzv_endpoint={PLACE} instead of 10.0.0.9:29500"):
        start_machine(run, values_of())
    now = values_of(join_seconds=60)
    late = threading.Timer(
        0.1, run.refreeze, [{**now, "launch": {**now["launch"], "node_rank": 0}}]
    )
    late.start()
    assert start_machine(run, now) == 41
    late.join()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("node_rank", [0, 1])
def test_agents_meet_at_the_first_machine_s_address(node_rank):
    assert rendezvous_parameters(launch_of(node_rank=node_rank), node_rank) == {
        "endpoint": PLACE,
        "min_nodes": 1,
        "local_addr": "10.0.0.2",
        "is_host": node_rank == 0,
        "join_timeout": 1,
        "last_call_timeout": 30,
        "keep_alive_interval": 5,
        "keep_alive_max_attempt": 3,
    }
