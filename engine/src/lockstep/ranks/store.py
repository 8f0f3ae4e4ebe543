"""The store at which ranks meet: a few keys and values, served by one process over TCP.

A launcher's store may be older than its ranks. torchrun keeps its own when it restarts ranks, with
the addresses that dead ranks have written there (pytorch#135712), so restarted ranks would connect
to nobody. The number of restarts, which torchrun tells its ranks, can differ between nodes. So
each start of ranks agrees on a name of its own, and uses only keys below that name.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lockstep.ranks.address import LOOPBACK
from lockstep.ranks.waiting import MeetingError, Waiting

LOOKUP_SECONDS = 0.5  # between questions to a name server
OWN_NAMES = (LOOPBACK, "localhost")


def meet(rank: int, world_size: int, seconds: float, hint: str = "") -> Store:
    """Connect to the store of all ranks; return the part of it that belongs to this start.

    Args:
        rank: the number of this rank.
        world_size: total number of ranks.
        seconds: the longest wait for the other ranks.
        hint: printed once if others are late.

    Raises:
        MeetingError: not all ranks came in time.
    """
    waiting = Waiting(seconds, hint)
    try:
        store = _connected(rank, seconds, waiting)
        return PrefixStore(_name_of_start(store, rank, world_size, waiting), store)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for errors of its store
        raise MeetingError(str(error).splitlines()[0]) from error


def _connected(rank: int, seconds: float, waiting: Waiting) -> TCPStore:
    """Serve the store, if that is this rank's task, and connect to it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host in OWN_NAMES:
        host = LOOPBACK
    timeout = timedelta(seconds=seconds)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's agent serves it
        with socket.create_connection((host, port), timeout=seconds):
            pass  # refused at once if the agent is gone; torch would try again until the end
        return TCPStore(host, port, is_master=False, timeout=timeout)
    _wait_for_address(host, port, waiting)
    if rank != 0:
        _wait_for_server(host, port, waiting)
        return TCPStore(host, port, is_master=False, timeout=timeout)
    serving: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    if host == LOOPBACK:
        # Where no other machine can connect; torch's default listens on all addresses.
        listener = socket.create_server((LOOPBACK, port))
        serving["master_listen_fd"] = listener.detach()  # torch owns it from now on
    return TCPStore(host, port, timeout=timeout, **serving)


def _wait_for_address(host: str, port: int, waiting: Waiting) -> None:
    """Wait until the name of a host has an address: that of a new pod may come late."""
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except socket.gaierror as error:
            waiting.go_on(f"an address of MASTER_ADDR={host}", str(error.strerror))
            time.sleep(LOOKUP_SECONDS)


def _wait_for_server(host: str, port: int, waiting: Waiting) -> None:
    """Wait until rank 0 serves the store; torch would print a stack if it never does."""
    while True:
        try:
            socket.create_connection((host, port), timeout=10).close()
            return
        except OSError as error:
            waiting.go_on("rank 0", error.strerror or str(error))


def _name_of_start(store: Store, rank: int, world_size: int, waiting: Waiting) -> str:
    """Return a name that all ranks of this start know, and none of an earlier start.

    Rank 0 draws the name. Each other rank asks for it with a word of its own; what rank 0 answers
    to an earlier start's words, nobody reads. Rank 0 answers until all ranks have thanked it.
    """
    if rank != 0:
        word = secrets.token_hex(8)
        store.set(f"start/word of rank {rank}", word)
        while not store.check([f"start/answer to {word}"]):
            waiting.go_on("rank 0")
        name: str = store.get(f"start/answer to {word}").decode()
        store.set(f"{name}/thanks of rank {rank}", "")
        return name
    name = secrets.token_hex(8)
    missing = [*range(1, world_size)]
    while missing:
        for other in missing:
            question = f"start/word of rank {other}"
            if store.check([question]):
                store.set(f"start/answer to {store.get(question).decode()}", name)
        missing = [
            other for other in missing if not store.check([f"{name}/thanks of rank {other}"])
        ]
        if missing:
            waiting.go_on(f"rank {', '.join(map(str, missing))}")
    return name
