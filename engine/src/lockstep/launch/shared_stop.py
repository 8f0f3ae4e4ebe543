"""A stop signal to one of several machines, which the agents of the others follow.

The ranks agree on it by themselves and save together. But an agent whose ranks have stopped can't
know why: after a signal to a single rank, it must restart them, and would wait for a machine that
has ended. So an agent that gets a signal writes it into the store where the machines meet. Those
that still wait for others to come look there, too.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup

from lockstep.exits import SIGNALS, Ending
from lockstep.launch.first_signal import FirstSignal
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory

KEY = "stopped_by"  # of the number of the signal
ENDED = "ended"  # the first part of a machine's key: its ranks have ended
LEFT = "left"  # the same: it needs the store no longer
LOOK_SECONDS = 1.0  # between looks at the store, which may serve many machines
LEAVE_SECONDS = 5.0  # that a machine waits for the others; one may be lost


class SharedStop:
    """The stop signal of a run on several machines; with one machine, it does nothing.

    Args:
        group: this machine's ranks; has a store for them once the machines have met.
        store: where the machines meet; None: there is only one.
        first_signal: what handles the signals of this machine's agent.
        stops_all: whether a signal to this machine stops the others.
        has_store: whether the store ends with this machine's agent.
    """

    def __init__(
        self,
        group: WorkerGroup,
        store: Store | None,
        first_signal: FirstSignal,
        *,
        stops_all: bool,
        has_store: bool,
    ) -> None:
        self._group: Any = group  # torch types what is set later as None
        self._store_of_all: Any = store  # torch's types lack `clone`
        self._first_signal = first_signal
        self._stops_all = stops_all
        self._has_store = has_store
        self._looked_at = -math.inf  # clock
        self._has_followed = False

    def announce(self) -> None:
        """Tell the other machines of the signal that stops this one, if one does."""
        store = self._store_of_all
        signum = self._first_signal.received
        if store is None or signum is None or not self._stops_all:
            return
        # `set` awaits no answer: it returns at once, even if the other machine is silent.
        with contextlib.suppress(DistError):
            store.set(KEY, str(int(signum)))

    def follow(self, *, at_once: bool) -> None:
        """Handle a signal that stops another machine as if it had come to this one.

        Args:
            at_once: whether to look at the store even if the last look was a moment ago.
        """
        store = self._store_of_all
        now = time.monotonic()
        if store is None or (now - self._looked_at < LOOK_SECONDS and not at_once):
            return
        self._looked_at = now
        signum = self._announced_in(store)
        if signum is not None:
            self._first_signal(signum, None)

    def _announced_in(self, store: Store) -> int | None:
        """Return the signal that stops another machine; None if none does, or if it is lost."""
        try:
            if not store.check([KEY]):
                return None
            signum = int(store.get(KEY))
        except DistError:
            return None  # the rendezvous fails, too, and says why
        self._has_followed = True
        return signum

    @contextlib.contextmanager
    def followed_by_thread(self) -> Iterator[None]:
        """Handle another machine's signal also in a block that waits for all machines to meet."""
        if self._store_of_all is None:
            yield
            return
        has_met = threading.Event()
        arguments = (self._store_of_all.clone(), threading.get_ident(), has_met)
        # Nobody waits for its end: if the machine with the store is silent, a call never returns.
        threading.Thread(target=self._follow_until, args=arguments, daemon=True).start()
        try:
            yield
        finally:
            has_met.set()

    def _follow_until(self, store: Store, thread: int, has_met: threading.Event) -> None:
        """Send another machine's signal to the `thread` that waits, unless it `has_met` all."""
        while not has_met.wait(LOOK_SECONDS):
            signum = self._announced_in(store)
            if signum is not None and not has_met.is_set():
                signal.pthread_kill(thread, signum)
                return

    def leave(self) -> None:
        """Wait for the ranks of the other machines, for some seconds at most.

        Only then, `summary.json` says whether all have saved. The store stays for the others.
        """
        store = self._store()
        if store is None:
            return
        # In a thread: if the machine with the store is silent, a call may never return.
        waiting = threading.Thread(target=self._wait_for_others, args=(store,), daemon=True)
        waiting.start()
        waiting.join(LEAVE_SECONDS)

    def _wait_for_others(self, store: Store) -> None:
        own = self._group.group_rank
        others = [rank for rank in range(self._group.group_world_size) if rank != own]
        awaited = LEFT if self._has_store else ENDED
        with contextlib.suppress(DistError):
            store.set(f"{ENDED}/{own}", "")
            while not store.check([f"{awaited}/{rank}" for rank in others]):
                time.sleep(0.05)
            store.set(f"{LEFT}/{own}", "")

    def report(self, run: RunDirectory, status: int, node_rank: int) -> None:
        """Print the last line of machine `node_rank` after a stop, unless another process does.

        Rank 0 does if all ranks have saved; otherwise, the command of machine 0.
        """
        stopped_by = Ending(status).stopped_by
        if self._store_of_all is None or not stopped_by:
            return
        has_met = self._store() is not None
        is_saved = has_met and bool(run.read_summary().get("saved"))
        if (is_saved and self._group.group_rank == 0) or (not is_saved and node_rank == 0):
            return
        cause = f"stopped by {SIGNALS[stopped_by]}"
        if self._has_followed:
            cause += " on another machine"
        if not has_met:
            cause += " before all machines met"
        elif not is_saved:
            cause += " before all ranks saved"
        last_line.show(run, cause, node_rank)

    def _store(self) -> Store | None:
        """Return the ranks' store; None before the machines have met, or if there is only one."""
        if (self._group.group_world_size or 1) < 2:
            return None
        return cast(Store, self._group.store)
