"""How ranks find each other before there is a process group, and how absent ranks are reported.

Every wait has a limit, and rank 0 knows which ranks it waits for: each rank leaves its messages
under its own key in the store at `MASTER_ADDR` and `MASTER_PORT`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from lockstep.cluster.report import Finding, failure, named, ok, warning
from lockstep.ranks.ranks import Ranks

STOP = "stop"  # the key with which rank 0 stops all ranks
CLOCK_LIMIT = 1.0  # seconds between clocks that make logs and file times hard to read
MARGIN = 10.0  # extra seconds that a rank waits for rank 0, which itself waits for others


class Absent(Exception):  # noqa: N818 (it names who is absent)
    """A rank did not come in time; `finding` says which, and what to do."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.line)
        self.finding = finding


@dataclass
class Meeting:
    """The ranks of a run and their store.

    Args:
        store: where ranks leave messages.
        ranks: this process's place.
        limit: the longest wait in seconds.
    """

    store: Store
    ranks: Ranks
    limit: float

    def gather(self, name: str, value: Any) -> list[Any]:
        """Send `value` to rank 0; return all ranks' values, by rank, on rank 0 and [] elsewhere.

        Raises:
            Absent: on rank 0; it names the ranks that sent nothing.
        """
        self.store.set(f"{name}/{self.ranks.rank}", json.dumps(value))
        if self.ranks.rank:
            return []
        keys = [f"{name}/{rank}" for rank in range(self.ranks.world_size)]
        missing = self._missing(keys, self.limit)
        if missing:
            self.store.set(STOP, "")
            who = [rank for rank, key in enumerate(keys) if key in missing]
            raise Absent(_absent(who, name, self.limit))
        return [json.loads(self.store.get(key)) for key in keys]

    def tell(self, name: str, value: Any) -> None:
        """Send rank 0's `value` to all ranks."""
        self.store.set(f"{name}/told", json.dumps(value))

    def hear(self, name: str) -> Any:
        """Return the value that rank 0 sends; rank 0 may itself be waiting for others first.

        Raises:
            Absent: rank 0 sends nothing in time, or has stopped.
        """
        limit = self.limit + MARGIN
        if self._missing([f"{name}/told"], limit):
            if self.store.check([STOP]):
                raise Absent(failure("doctor", "rank 0 has stopped", "see its output"))
            raise Absent(_absent([0], name, limit))
        return json.loads(self.store.get(f"{name}/told"))

    def _missing(self, keys: Iterable[str], limit: float) -> set[str]:
        """Wait until all `keys` exist; return those that are missing at the end."""
        end = time.monotonic() + limit
        missing = set(keys)
        while True:
            missing = {key for key in missing if not self.store.check([key])}
            if not missing or time.monotonic() > end or self.store.check([STOP]):
                return missing
            time.sleep(0.02)

    def clock_offsets(self) -> list[tuple[float, float]]:
        """Return how many seconds each clock is ahead of rank 0's, and the possible error of that.

        Rank 0 asks one rank after another. A rank is assumed to read its clock halfway between the
        question and the answer (Cristian 1989).
        """
        rank = self.ranks.rank
        if rank:
            self.hear(f"clock/{rank}")
            self.store.set(f"clock/{rank}/answer", json.dumps(time.time()))
            return []
        offsets = [(0.0, 0.0)]
        for other in range(1, self.ranks.world_size):
            sent_at = time.time()
            self.tell(f"clock/{other}", None)
            if self._missing([f"clock/{other}/answer"], self.limit):
                self.store.set(STOP, "")
                raise Absent(_absent([other], "clock", self.limit))
            answered_at = time.time()
            theirs = json.loads(self.store.get(f"clock/{other}/answer"))
            halfway = (sent_at + answered_at) / 2
            offsets.append((theirs - halfway, (answered_at - sent_at) / 2))
        return offsets

    def close(self, status: str) -> str:
        """Send rank 0's `status`, the overall result, to all ranks; return it.

        Rank 0 waits until the others have read it, but only a few seconds: the store ends with it.
        """
        if self.ranks.rank:
            heard = str(self.hear("status"))
            self.store.set(f"heard/{self.ranks.rank}", "")
            return heard
        self.tell("status", status)
        self._missing((f"heard/{rank}" for rank in range(1, self.ranks.world_size)), MARGIN)
        return status


def examine_clocks(offsets: list[tuple[float, float]]) -> Finding:
    """Check the clock offsets in seconds; the second number of each pair is its uncertainty."""
    late = [rank for rank, (offset, _) in enumerate(offsets) if abs(offset) > CLOCK_LIMIT]
    worst, doubt = max(offsets, key=lambda pair: abs(pair[0]))
    line = f"{abs(worst) * 1e3:.1f} ms apart at most, measured to {doubt * 1e3:.1f} ms"
    if late:
        return warning("clocks", f"{named(late)} up to {abs(worst):.1f} s off", "run NTP there")
    return ok("clocks", line)


def _absent(ranks: Iterable[int], name: str, limit: float) -> Finding:
    who = named(ranks)
    what = "did not arrive" if name == "facts" else f"did not answer ({name})"
    return failure(
        "rendezvous",
        f"{who} {what} within {limit:.0f} s",
        f"start {who}, or see why it ended; WORLD_SIZE must be the number of ranks started",
    )


def open_meeting(ranks: Ranks, limit: float) -> Meeting:
    """Connect to the store; rank 0 creates it unless a launcher's agent has done so.

    Raises:
        Absent: the port is in use, nothing answers at it, or what answers is not a store.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    end = time.monotonic() + limit
    hosts = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if hosts:
        _refuse_taken(port)
    else:
        error = _unanswered(host, port, end)
        if error:
            line = f"nothing answered at {host}:{port} within {limit:.0f} s ({error})"
            fix = "start rank 0, and check address, port and firewall"
            raise Absent(failure("rendezvous", line, fix))
    store = _store(host, port, hosts, end)
    if store is None:
        line = f"{host}:{port} answers, but is not a torch store"
        fix = "set a MASTER_PORT that no other program uses; use the same torch everywhere"
        raise Absent(failure("rendezvous", line, fix))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(PrefixStore(f"doctor/{restart}", store), ranks, limit)


def _refuse_taken(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            line = f"MASTER_PORT={port} cannot be opened on this machine ({error.strerror})"
            fix = "set another port, or end the program that uses it (ss -ltnp)"
            raise Absent(failure("rendezvous", line, fix)) from None


def _unanswered(host: str, port: int, end: float) -> str:
    """Try the port until something accepts; return the last error, or an empty string."""
    reason = "no time"
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), timeout=left).close()
            return ""
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(0.05)
    return reason


def _store(host: str, port: int, hosts: bool, end: float) -> Store | None:
    """Return the store; None if there is no connection in time.

    It connects in a thread because torch waits without limit for another program's greeting.
    """
    stores: list[Store] = []

    def connect() -> None:
        left = timedelta(seconds=max(1.0, end - time.monotonic()))
        with contextlib.suppress(RuntimeError):  # DistError is one
            stores.append(TCPStore(host, port, None, hosts, left, wait_for_workers=False))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(max(1.0, end - time.monotonic()))
    return stores[0] if stores else None
