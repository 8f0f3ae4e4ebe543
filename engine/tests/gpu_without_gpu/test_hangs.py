"""Hangs and aborts as on GPUs, simulated with gloo: a run's exit status, and how soon it ends."""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from types import SimpleNamespace

import pytest
from lightning import Callback

from lockstep.callbacks.guards import Guards, stall_limit
from lockstep.launch.agent import FAILURE_GRACE, RankAgent
from lockstep.launch.first_signal import FirstSignal
from lockstep.launch.shared_stop import SharedStop
from lockstep.ranks.flight_recorder import record_collectives
from lockstep.ranks.ranks import backend_of
from lockstep.strategies import placing as strategies

TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
DDP = {"process_group_backend": None, "timeout_seconds": 60, "comm_hook": "none"}
UNFINISHED = """
import lightning, torch
class Unfinished(lightning.Callback):
    def on_train_start(self, trainer, module):
        trainer.strategy.model.register_comm_hook(None, unfinished)
def unfinished(state, bucket):
    return torch.futures.Future()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_hanging_all_reduce_shows_stacks_and_collectives(command):
    (command.folder / "hanging.py").write_text(UNFINISHED)
    words = ("+callbacks.hanging._target_=hanging.Unfinished", "guard.stall_after=3", "run_dir=run")
    started = time.monotonic()
    environment = {"PYTHONPATH": str(command.folder), "TORCH_FR_BUFFER_SIZE": "50"}
    said = command.train(*TWO, *words, status=1, **environment).stderr
    assert time.monotonic() - started < 100
    for rank in (0, 1):
        assert f"rank {rank}: no step for 3 s (guard.stall_after); its stack:" in said
        trace = command.folder / f"run/ranks/nccl_trace_rank_{rank}"
        assert re.search(rf"rank {rank}: its last collectives: \S*{trace.name} \(torchfr", said)
        entries = pickle.loads(trace.read_bytes())["entries"]
        assert any("all_gather" in entry["profiling_name"] for entry in entries)
    assert "restarting" not in said
    assert "in backward" in said


class Vanish(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise KeyError("vanishes, as if it were killed")


class Blocked(Callback):
    """Like a copy from GPU to host that waits behind a kernel that waits for a lost rank."""

    def setup(self, trainer, pl_module, stage):
        def block():
            time.sleep(600)

        pl_module.cpu = block
        epoch_loop = trainer.fit_loop.epoch_loop
        epoch_loop._results.cpu = block
        epoch_loop.val_loop._results.cpu = block


FSDP2 = {
    "process_group_backend": None,
    "timeout_seconds": 60,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "reshard_after_forward": True,
    "save_parts": False,
    "reduce_each": False,
}
STRATEGIES = {
    "ddp": lambda: strategies.ddp(**DDP),
    "fsdp2": lambda: strategies.fsdp2(**FSDP2),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_nothing_is_copied_from_the_device_after_a_lost_rank(
    name, on_ranks, new_run, rank_environment
):
    def rank(number):
        os.environ.update(rank_environment(number, 2))
        try:
            new_run().fit(Vanish(), Blocked(), strategy=STRATEGIES[name](), devices=2)
        except (RuntimeError, KeyError) as error:
            return type(error).__name__
        return "done"

    started = time.monotonic()
    assert on_ranks(2, rank) == ["RuntimeError", "KeyError"]
    assert time.monotonic() - started < 30


ABORTING = """
import os, lightning
class Aborting(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3:
            os.abort()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_aborted_by_nccl_s_watchdog_is_restarted_once(command):
    (command.folder / "aborting.py").write_text(ABORTING)
    words = ("trainer=cpu", "trainer.devices=1", "run_dir=run", "checkpoint.every=100")
    abort = "+callbacks.aborting._target_=aborting.Aborting"
    started = time.monotonic()
    said = command.train(*words, abort, status=1, PYTHONPATH=str(command.folder)).stderr
    assert time.monotonic() - started < 100
    assert said.count("rank 0 was killed by SIGABRT; restarting all ranks (1 of 3)") == 1
    assert said.count("; no restarts are left") == 1
    assert "(2 of 3)" not in said


def test_ranks_restarted_after_a_loss_do_not_get_the_time_to_save(monkeypatch):
    closed, stopped = [], []
    monkeypatch.setattr(RankAgent, "_stop_ranks", lambda _self, *given: stopped.append(given))
    context = SimpleNamespace(close=lambda *given: closed.append(given))
    agent = RankAgent.__new__(RankAgent)
    agent._pcontext, agent._shutdown_timeout = context, 60
    alone = SimpleNamespace(group_world_size=1)
    agent._shared_stop = SharedStop(alone, None, FirstSignal(), stops_all=True, has_store=True)
    agent._stop_workers(None)
    assert stopped == [(signal.SIGTERM, FAILURE_GRACE)]
    assert closed == [(signal.SIGKILL, 1)]  # those that are left
    assert FAILURE_GRACE <= 5


@pytest.mark.parametrize(
    ("accelerator", "stall_after", "timeout", "limit"),
    [
        ("cuda", 1800.0, 1800, 1680.0),  # the defaults: ours comes first
        ("cuda", 60.0, 1800, 60.0),
        ("cuda", 1800.0, 100, 50.0),
        ("cpu", 1800.0, 1800, 1800.0),  # with gloo, hosts do wait
    ],
)
def test_the_guard_comes_before_nccl_s_watchdog(accelerator, stall_after, timeout, limit):
    assert stall_limit(stall_after, backend_of(accelerator), timeout) == limit


def test_runs_and_guards_have_the_same_limit(composed):
    assert composed("experiment=smoke").guard.stall_after == Guards().stall_after == 1800.0


def test_nccl_s_flight_recorder_is_on_before_ranks_meet(monkeypatch, tmp_path):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    record_collectives("gloo", tmp_path)
    assert not any(name in os.environ for name in names)
    record_collectives("nccl", tmp_path)
    place = str(tmp_path / "nccl_trace_rank_")
    assert [os.environ[name] for name in names] == ["2000", "1", place]
