"""How ranks start, in order: find the devices, decide and freeze everything, start the agent.

This process stays light: it doesn't import torch, so it reports mistakes at once, and can set what
the ranks need before torch starts (threads, allocator). Exceptions: launch.inline, launchers.
"""

import contextlib
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lockstep_gpt import processes
from lockstep_gpt.config import LEVELS, Config, UserError
from lockstep_gpt.data import prepare as data_prepare
from lockstep_gpt.data import shards
from lockstep_gpt.launch import devices
from lockstep_gpt.registry import addition, additions, asked
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training import schedule


def train_once(values: dict[str, Any], config: Config) -> tuple[int, float]:
    """Run one training to its end; return its exit status and its validation loss."""
    run = run_of(config)
    settled = settle(values, placed(config)[0], run)
    status = begin(run, settled, config, run.refuse_if_used, run.create, run.discard)
    return status, float(run.read_summary().get("val_loss") or "nan")


def begin(
    run: RunDirectory,
    settled: dict[str, Any],
    config: Config,
    check: Callable[[], Any],
    freeze: Callable[[dict[str, Any]], None],
    undo: Callable[[], None],
) -> int:
    """Start the ranks, or run as one of a launcher's; return the exit status.

    This machine would freeze `settled`, which is `config` as plain values. `check` may raise
    before anything is read or written; `freeze` creates the directory, or freezes again; `undo`
    reverts that.
    """
    inside = devices.is_inside_launcher()
    if inside and not any(additions("JOIN_LAUNCHER")):
        raise UserError(
            "torchrun or another launcher started this process; joining it needs the extra "
            "launchers, which is not installed; start the command without a launcher"
        )
    alone = not inside and config.trainer.get("num_nodes", 1) == 1
    undoable = False
    with contextlib.ExitStack() as held:

        def owned() -> RunDirectory:
            nonlocal undoable
            check()
            undoable = alone or run.config.exists()  # others may still write into a new one
            # Fixed before ranks start: all of them, and every restart, open these tokens.
            data = {**settled["data"], "fingerprint": prepared(config).fingerprint}
            held.enter_context(run.locked())
            freeze({**settled, "data": data})
            asked("PERMIT", run, True)
            return run

        if inside:
            status = int(addition("JOIN_LAUNCHER")(settled, config, owned, undo))
        elif not alone:
            status = int(addition("START_ON_NODES")(run, settled, config, owned))
        elif owned() and config.launch.inline:  # type: ignore[truthy-bool]
            from lockstep_gpt.training import train as rank  # for a debugger

            status = rank.main(run)
        else:
            status = supervise(run)
        if status == 2 and undoable:
            undo()
        return status


def placed(config: Config) -> tuple[devices.Placement, int]:
    """Find the devices, reject what their number makes impossible; return them and the steps."""
    logging.getLogger().setLevel(LEVELS[config.verbosity])
    placement = devices.place(config)
    batch = schedule.plan_batch(
        config.batch, config.model.block_size, placement.devices, placement.nodes
    )
    return placement, schedule.plan_schedule(config, batch).total_steps


def prepared(config: Config, verify: bool = False) -> shards.Index:
    """Prepare the data before any rank starts: its errors are reported here, once."""
    folder = data_prepare.prepare(config.data, verify)
    index = shards.load_index(folder)
    shards.check_block_size(index, config.model.block_size)
    asked("PREPARED", folder, config)
    return index


def run_of(config: Config) -> RunDirectory:
    """Return the run directory; each job of a sweep gets a numbered one below it."""
    job = HydraConfig.get()
    choices = job.runtime.choices
    path = Path(config.run_dir or new_name(choices["model"], choices["data"]))
    return RunDirectory(path / str(job.job.num) if is_sweep() else path)


def new_name(*parts: str) -> str:
    """Name a directory after the time; two launches in one second must not collide."""
    date = time.strftime("%Y%m%d-%H%M%S")
    return f"runs/{'-'.join([date, *parts, secrets.token_hex(2)]).replace('/', '-')}"


def is_sweep() -> bool:
    """Return whether this is a job of a sweep."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def settle(
    values: dict[str, Any], placement: devices.Placement, run: RunDirectory
) -> dict[str, Any]:
    """Return `values` with everything decided that ranks could otherwise decide differently."""
    choices = HydraConfig.get().runtime.choices
    world = placement.devices * placement.nodes
    name = f"{choices['model']}-{choices['data']}-{world}-{time.strftime('%Y%m%d-%H%M%S')}"
    batch = values["batch"]
    size = batch["global_size"] or batch["micro_size"] * world
    loggers = dict(values["logger"])
    if is_sweep() and "wandb" in loggers:  # one group there, unless set
        group = loggers["wandb"].get("group") or run.path.parent.name
        loggers["wandb"] = {**loggers["wandb"], "group": group}
    return {
        **values,
        "run_dir": str(run.path),
        "run_name": values["run_name"] or name.replace("/", "-"),
        "batch": {**batch, "global_size": size},
        "trainer": trainer_settled(values, placement),
        "logger": loggers,
    }


def trainer_settled(values: dict[str, Any], placement: devices.Placement) -> dict[str, Any]:
    """Return the settings of the Trainer with the devices that were found."""
    return {**values["trainer"], "accelerator": placement.accelerator, "devices": placement.devices}


# For glibc: else each step maps its large tensors again, and the system clears their pages.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


def supervise(run: RunDirectory, node_rank: int = 0) -> int:
    """Start the ranks' agent, pass our signals on to it, and return the run's exit status."""
    before = run.read_summary()
    passed: list[signal.Signals] = []
    agent: Any = None  # like `subprocess.Popen`

    def forward(signum: int, _frame: FrameType | None) -> None:
        impatient = signum == signal.SIGINT and signal.SIGINT in passed
        passed.append(signal.Signals(signum))
        if agent is None:  # there is no agent yet to pass it on to
            raise KeyboardInterrupt
        agent.send_signal(signal.SIGKILL if impatient else signum)
        if signum == signal.SIGINT and not impatient:
            print("\nsaving after this step; press Ctrl-C again to stop at once", flush=True)

    handlers = {signum: signal.signal(signum, forward) for signum in processes.STOP_SIGNALS}
    try:
        with sharing_servers():  # kept alive: it created what its forks share
            agent = _start_agent(run, node_rank)
            status: int = agent.wait()
    except KeyboardInterrupt:
        status = -passed[0]
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    if status < 0:  # the agent itself was killed, by us or by others
        status = 128 + passed[0] if passed else 1
    unsaved = passed and status > 128 and run.read_summary() == before
    if (status == 1 or unsaved) and not node_rank:  # also if no rank was left to report it
        told = {"status": "stopped" if unsaved else "failed", "saved": False}
        with contextlib.suppress(OSError):  # a full disk, already reported
            run.write_summary({**run.read_summary(), **told})
    if unsaved and not node_rank:
        logging.warning("stopped by %s before all ranks saved; %s", passed[0].name, run.way_on())
    return status


def _start_agent(run: RunDirectory, node_rank: int) -> Any:
    """Start the agent: a fork of a process that has imported everything, or a new process."""
    config, warm = run.load(), addition("SERVERS")
    environment = rank_environment(config)
    if warm and (agent := warm.start_agent(run, node_rank, config, environment)):
        return agent
    # In its own session: a Ctrl-C reaches the ranks once, through us.
    words = processes.command("agent", run, node_rank)
    return subprocess.Popen(words, env=environment, start_new_session=True)


def sharing_servers() -> contextlib.AbstractContextManager[None]:
    """Let runs started meanwhile, the jobs of a sweep, be forks of the same process."""
    warm = addition("SERVERS")
    return warm.kept() if warm else contextlib.nullcontext()


def rank_environment(config: Config) -> dict[str, str]:
    """Return variables that libraries of agent and ranks read at load; the user's values stay."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // config.trainer["devices"])
    keeps = config.launch.keep_memory and config.trainer["accelerator"] == "cpu"
    ours = {"OMP_NUM_THREADS": str(threads), **(KEEP_MEMORY if keeps else {})}
    return {**ours, **os.environ}
