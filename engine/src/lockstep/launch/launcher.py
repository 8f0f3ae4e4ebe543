"""Run as a rank of torchrun, srun, or another launcher: meet the others, and agree on one run.

Every rank has composed the configuration by itself. Rank 0 chooses the run directory and freezes
its configuration there. The other ranks compare theirs, and then all use what is frozen.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import ReportedError, RunError, UserError
from lockstep.exits import Exit
from lockstep.processes import end_process, end_with_parent, print_error, program_name
from lockstep.ranks.waiting import MeetingError, Waiting
from lockstep.run.directory import RunDirectory, differences
from lockstep.settings import check, counted

if TYPE_CHECKING:  # the parent of an agent never imports torch
    from torch.distributed import Store  # type: ignore[attr-defined]

FREEZE_SECONDS = 50.0  # for rank 0 to freeze the configuration; locks may take ten of them
RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun gives this variable to its ranks
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
UNSET = "if no launcher started this process, run: unset RANK WORLD_SIZE LOCAL_WORLD_SIZE"


def is_inside_launcher() -> bool:
    """Return whether a launcher has given this process its rank, or raise a `UserError`.

    A shell in a container or a notebook can have variables of a launcher that isn't there.
    """
    _refuse_words_for_numbers()
    if not has_rank():
        return False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are set, but "
            f"{' and '.join(missing)} {verb} not; {UNSET}"
        )
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    check("RANK", rank, int(rank) < int(size), f"must be below WORLD_SIZE={size}; {UNSET}")
    return True


def _refuse_words_for_numbers() -> None:
    for name in NUMBERS:
        text = os.environ.get(name, "0")
        check(name, text, text.isdecimal(), f"must be a whole number; {UNSET}")


def has_rank() -> bool:
    """Return whether the environment says that this process is one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_with_launcher() -> None:
    """Let this process, if torchrun has started it, end with torchrun."""
    if RUN_ID not in os.environ or not has_rank():  # a shell may have kept torchrun's variable
        return  # srun ends its processes; others may be started from a shell that ends early
    parent = os.getppid()
    if _has_adopted_us(parent):
        print_error(
            f"{program_name()}: {RUN_ID}={os.environ[RUN_ID]} and RANK={os.environ['RANK']} are "
            f"set, but torchrun has ended; {UNSET} {RUN_ID}"
        )
        end_process(Exit.FAILED)
    end_with_parent(parent)


def _has_adopted_us(parent: int) -> bool:
    """Return whether `parent` did not start this process but is, for example, systemd.

    What starts a rank is torchrun, a Python of our user, or a shell script in between, which has
    torchrun's variables as we have.
    """
    process = Path(f"/proc/{parent}")
    try:
        status = (process / "status").read_text()
        owner = int(status.partition("\nUid:")[2].split()[0])
        if owner != os.getuid():
            return True
        program = (process / "exe").readlink().name
        variables = (process / "environ").read_bytes().split(b"\0")
    except (OSError, IndexError, ValueError):  # another system, or not allowed
        return parent == 1
    names = [variable.partition(b"=")[0] for variable in variables]
    return "python" not in program and RUN_ID.encode() not in names


def launched_sizes(devices: int | str, nodes: int) -> tuple[int, int]:
    """Return devices per machine and machines; reject settings that do not match the launcher."""
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    launched = world_size // local_world_size
    rule = (
        f"but the launcher started {counted(local_world_size, 'rank')} on this machine; "
        f"set trainer.devices=auto, or start {devices}; {UNSET}"
    )
    check("trainer.devices", devices, devices in ("auto", local_world_size), rule)
    rule = f"but the launcher started {launched}; set trainer.num_nodes={launched}"
    check("trainer.num_nodes", nodes, nodes in (1, launched), rule)
    return local_world_size, launched


def meet(join_seconds: float) -> Store | None:
    """Connect to the other ranks' store, which is None for a single rank.

    Args:
        join_seconds: the longest wait.

    Raises:
        RunError: the launcher or its other ranks are not there. Another try may succeed.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        return None
    from lockstep.ranks import store

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    hint = (
        f"rank {rank} of {world_size} meets them at {address}; start all with this MASTER_ADDR "
        f"and MASTER_PORT; launch.join_seconds sets the limit; {UNSET}"
    )
    try:
        return store.meet(rank, world_size, join_seconds, hint)
    except MeetingError as error:
        raise RunError(
            f"rank {rank} of {world_size} cannot meet the others at {address} ({error}); start all "
            "of them within launch.join_seconds, with a free MASTER_PORT on a machine that all "
            f"can reach; {UNSET}"
        ) from None


def agree(
    store: Store | None, values: dict[str, Any], freeze: Callable[[], RunDirectory]
) -> RunDirectory:
    """Agree with the other ranks on one run directory, which rank 0 freezes.

    Args:
        store: where the ranks have met; None for a single rank.
        values: the configuration that this rank has composed.
        freeze: creates or continues the run; only rank 0 calls it.

    Raises:
        UserError: on rank 0, for a mistake, or a configuration that differs between ranks.
        RunError: on rank 0, for another reason that prevents the run.
        ReportedError: on the other ranks, when rank 0 raises one of these.
    """
    if store is None:
        return freeze()
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        if rank == 0:
            return _agree_as_first(store, world_size, freeze)
        return _agree_with_first(store, rank, values)
    except (MeetingError, RuntimeError) as error:  # torch raises the latter for a lost store
        raise RunError(f"rank {rank} lost the other ranks before training ({error})") from None


def _agree_as_first(
    store: Store, world_size: int, freeze: Callable[[], RunDirectory]
) -> RunDirectory:
    others = range(1, world_size)
    try:
        run = freeze()
        # The run's current path: it may have moved since it was frozen.
        offer = {"status": Exit.DONE, "path": str(run.path), "values": run.values()}
        store.set("offer", json.dumps(offer))
        for rank in others:
            differing = store.get(f"differences of rank {rank}").decode()
            if differing:
                raise UserError(
                    f"rank {rank} has a different configuration than rank 0: {differing}; use the "
                    "same command on all ranks"
                )
    except (UserError, RunError) as error:
        store.set("offer", json.dumps({"status": error.status}))  # for those still waiting for it
        store.set("verdict", str(int(error.status)))
        with contextlib.suppress(RuntimeError):  # some may have ended
            for rank in others:  # this process may serve the store: it leaves last
                store.get(f"rank {rank} leaves")
        raise
    store.set("verdict", str(int(Exit.DONE)))
    return run


def _agree_with_first(store: Store, rank: int, values: dict[str, Any]) -> RunDirectory:
    waiting = Waiting(FREEZE_SECONDS)
    while not store.check(["offer"]):
        waiting.go_on("rank 0")
    offer = json.loads(store.get("offer"))
    status = int(offer["status"])
    if status == Exit.DONE:
        differing = differences(offer["values"], values)
        store.set(f"differences of rank {rank}", ", ".join(differing))
        status = int(store.get("verdict"))
    if status != Exit.DONE:
        store.set(f"rank {rank} leaves", "")
        raise ReportedError(status)
    return RunDirectory(Path(offer["path"]))
