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

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.waiting import hinting

READ_SECONDS = 60  # with less, a link down for seconds ends the run


def connect(
    run_id: str, config: Config, rendezvous: dict[str, Any]
) -> tuple[RendezvousHandler, Store | None]:
    """Return what lets this machine's agent meet the others, and the store where they meet.

    With only one machine, nobody needs the store.

    Args:
        run_id: the same on all machines of a run.
        config: how many machines there are.
        rendezvous: where and how they meet, as `RendezvousParameters` takes it.
    """
    parameters = RendezvousParameters(
        backend="c10d",
        run_id=run_id,
        max_nodes=config.trainer["num_nodes"],
        read_timeout=READ_SECONDS,
        **rendezvous,
    )
    with _hinting(config):
        backend, store = create_backend(parameters)
    # Its own connection: signs of life go on while this machine waits for a value of another.
    values: Store = cast(Any, store).clone()  # torch's types lack it
    values.set_timeout(timedelta(seconds=silence_of(config)))
    handler = create_handler(values, backend, parameters)
    return handler, store if parameters.max_nodes > 1 else None


def _hinting(config: Config) -> contextlib.AbstractContextManager[None]:
    """Say whom this machine waits for, if that takes long."""
    nodes = config.trainer["num_nodes"]
    if nodes == 1:
        return contextlib.nullcontext()
    launch = config.launch
    return hinting(
        f"waiting until {nodes} machines meet at launch.rdzv_endpoint={launch.rdzv_endpoint}, at "
        f"most launch.join_seconds={launch.join_seconds:g} s; start the same command on each, with "
        "its own launch.node_rank, and check that each can reach this address"
    )


def silence_of(config: Config) -> float:
    """Return the seconds that machines wait for the others once they have met."""
    return 2 * config.launch.lost_seconds


def meet(meet_once: Callable[[], None], config: Config) -> None:
    """Call `meet_once` again while a machine doesn't answer that the others have met.

    Raises:
        RendezvousError: that took longer than `launch.join_seconds`.
    """
    limit = time.monotonic() + config.launch.join_seconds
    while True:
        try:
            with _hinting(config):
                meet_once()
            return
        except DistStoreError:
            fault = f"a machine that had joined was silent for {silence_of(config):g} s"
            if time.monotonic() > limit:
                raise RendezvousError(fault) from None
        print(f"{fault}; all machines meet again", file=sys.stderr)
