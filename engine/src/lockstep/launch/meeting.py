"""How the agents of all machines meet, and meet again if one of them stood still meanwhile.

Torch leaves out a machine that is silent for `launch.lost_seconds`, even if others have just met
it. These would then wait in vain for what it should write into the store.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from lockstep.launch.placement import Launch
from lockstep.ranks.waiting import hinting

READ_SECONDS = 60  # with less, a link down for seconds ends the run


def connect(
    run_id: str, launch: Launch, rendezvous: dict[str, Any]
) -> tuple[RendezvousHandler, Store | None]:
    """Return what lets this machine's agent meet the others, and the store where they meet.

    With only one machine, nobody needs the store.

    Args:
        run_id: the same on all machines of a run.
        launch: how many machines there are.
        rendezvous: where and how they meet, as `RendezvousParameters` takes it.
    """
    parameters = RendezvousParameters(
        backend="c10d",
        run_id=run_id,
        max_nodes=launch.nodes,
        read_timeout=READ_SECONDS,
        **rendezvous,
    )
    with _hinting(launch):
        backend, store = create_backend(parameters)
    # Its own connection: signs of life go on while this machine waits for a value of another.
    values: Store = cast(Any, store).clone()  # torch's types lack it
    values.set_timeout(timedelta(seconds=silence_of(launch)))
    handler = create_handler(values, backend, parameters)
    return handler, store if parameters.max_nodes > 1 else None


def _hinting(launch: Launch) -> contextlib.AbstractContextManager[None]:
    """Say whom this machine waits for, if that takes long."""
    nodes = launch.nodes
    if nodes == 1:
        return contextlib.nullcontext()
    settings = launch.settings
    return hinting(
        f"waiting until {nodes} machines meet at launch.rdzv_endpoint={settings.rdzv_endpoint}, "
        f"at most launch.join_seconds={settings.join_seconds:g} s; start the same command on each, "
        "with its own launch.node_rank, and check that each can reach this address"
    )


def silence_of(launch: Launch) -> float:
    """Return the seconds that machines wait for the others once they have met."""
    return 2 * launch.settings.lost_seconds


def meet(meet_once: Callable[[], None], launch: Launch) -> None:
    """Call `meet_once` again while a machine doesn't answer that the others have met.

    Raises:
        RendezvousError: that took longer than `launch.join_seconds`.
    """
    limit = time.monotonic() + launch.settings.join_seconds
    while True:
        try:
            with _hinting(launch):
                meet_once()
            return
        except DistStoreError:
            fault = f"a machine that had joined was silent for {silence_of(launch):g} s"
            if time.monotonic() > limit:
                raise RendezvousError(fault) from None
        print(f"{fault}; all machines meet again", file=sys.stderr)
