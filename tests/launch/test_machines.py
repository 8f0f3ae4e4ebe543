"""One of several machines: what it needs and waits for; tests of two are elsewhere."""

import threading
import time

import pytest

from lockstep_gpt.config import Config
from lockstep_gpt.distributed import waiting
from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.launch import machines, meeting, start
from lockstep_gpt.launch.launch_settings import LaunchConfig
from lockstep_gpt.launch.machines import rendezvous_parameters
from lockstep_gpt.launch.start import NewRun
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training.batch_settings import BatchConfig

VALUES = {
    "max_steps": 3,
    "batch": {"global_size": 8},
    "model": {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8},
    "data": {"_target_": "lockstep_gpt.data.sources.stdlib.StandardLibrary"},
    "optim": {"algorithm": "adamw"},
    "trainer": {"num_nodes": 2, "devices": 1},
    "launch": {"node_rank": 1},
}
PLACE = "10.0.0.1:29500"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run directory that this machine, number 1 of 2, shares with the first."""
    monkeypatch.setattr(machines, "own_address", lambda _: ("10.0.0.2", "eth7"))
    monkeypatch.setattr(start, "prepare_data", lambda _: "tokens")
    monkeypatch.setattr(start.supervise, "supervise", lambda _, node_rank: 40 + node_rank)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return RunDirectory(tmp_path / "run")


def start_machine(run, values, config):
    """Start this machine's part of the run; return its exit status."""
    return start.start(NewRun(run, config, values))


def config(node_rank=1, join_seconds=0.3, **settings):
    place = {"run_dir": "run", "rdzv_endpoint": PLACE, **settings}
    launch = LaunchConfig(
        node_rank=node_rank,
        rdzv_endpoint=place["rdzv_endpoint"],
        join_seconds=join_seconds,
        min_nodes=1,
    )
    trainer = {"num_nodes": 2, "devices": 1, "accelerator": "cpu"}
    model = ModelConfig(block_size=8, n_layer=1, n_head=1, n_embd=8)
    parts = {"batch": BatchConfig(micro_size=4), "model": model, "trainer": trainer}
    return Config(max_steps=3, run_dir=place["run_dir"], launch=launch, **parts)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"run_dir": None},
            "run_dir=null with trainer.num_nodes=2; set it to the same folder on all",
        ),
        (
            {"rdzv_endpoint": None},
            "launch.rdzv_endpoint=null with trainer.num_nodes=2; set it to the same HOST:PORT of "
            "machine 0 on all",
        ),
        ({"node_rank": 2}, "launch.node_rank=2 must be from 0 to 1"),
    ],
)
def test_settings_that_all_machines_need_are_required(run, settings, line):
    with pytest.raises(UserError, match=line):
        start_machine(run, VALUES, config(**settings))


def test_a_batch_that_fewer_machines_cannot_divide_is_rejected_at_the_start(run):
    odd = {**VALUES, "batch": {"global_size": 2 * 3}}
    with pytest.raises(UserError, match=r"global_size=6 is not divisible by batch\.micro"):
        start_machine(run, odd, config(node_rank=0))


def test_the_first_machine_freezes_the_run_and_the_others_read_it(run):
    assert start_machine(run, VALUES, config(node_rank=0)) == 40
    assert run.values() == {**VALUES, "data": {**VALUES["data"], "fingerprint": "tokens"}}
    other = {**VALUES, "launch": {"node_rank": 0}}  # settings of one machine may differ
    assert start_machine(run, other, config()) == 41


def test_a_machine_that_times_out_or_has_other_settings_gets_the_reason(run):
    with pytest.raises(RunError, match=r"after 0\.3 s it lacks config\.yaml"):
        start_machine(run, VALUES, config())
    run.create(VALUES)
    with pytest.raises(UserError, match=r"a different configuration.*: max_steps=4 instead of 3"):
        start_machine(run, {**VALUES, "max_steps": 4}, config())


def test_a_machine_says_once_that_it_waits_for_the_first_and_how_long(run, monkeypatch, capsys):
    monkeypatch.setattr(machines, "HINT_SECONDS", 0.05)
    with pytest.raises(RunError):
        start_machine(run, VALUES, config(join_seconds=0.5))
    limit = "at most launch.join_seconds=0.5 s"
    assert capsys.readouterr().err == (
        f"waiting for machine 0, {limit}: run_dir={run.path} lacks config.yaml; check that all "
        "machines share it, and that machine 0 has started\n"
    )


def test_an_agent_says_where_it_waits_only_if_others_are_late(monkeypatch, capsys):
    monkeypatch.setattr(waiting, "HINT_SECONDS", 0.05)
    meeting.meet(lambda: None, config())
    assert capsys.readouterr().err == ""
    meeting.meet(lambda: time.sleep(0.5), config())
    place = f"launch.rdzv_endpoint={PLACE}, at most launch.join_seconds=0.3 s"
    line = f"waiting until 2 machines meet at {place}; start the same command on each"
    assert capsys.readouterr().err.startswith(line)


def frozen_with(endpoint):
    return {**VALUES, "launch": {"node_rank": 0, "rdzv_endpoint": endpoint}}


def test_a_machine_waits_for_the_first_machine_s_current_endpoint(run):
    run.create(frozen_with("10.0.0.9:29500"))  # by a start with another first machine
    now = frozen_with(PLACE)
    now["launch"]["node_rank"] = 1
    with pytest.raises(UserError, match=f"launch.rdzv_endpoint={PLACE} instead of 10.0.0.9:29500"):
        start_machine(run, now, config())
    late = threading.Timer(0.1, run.refreeze, [frozen_with(PLACE)])
    late.start()
    assert start_machine(run, now, config(join_seconds=60)) == 41
    late.join()


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("node_rank", [0, 1])
def test_agents_meet_at_the_first_machine_s_address(node_rank):
    assert rendezvous_parameters(config(node_rank), node_rank) == {
        "endpoint": PLACE,
        "min_nodes": 1,
        "local_addr": "10.0.0.2",
        "is_host": node_rank == 0,
        "join_timeout": 1,
        "last_call_timeout": 30,
        "keep_alive_interval": 5,
        "keep_alive_max_attempt": 3,
    }
