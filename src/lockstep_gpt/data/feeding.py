"""Loads the batches of one rank ahead of training, and moves them to its device.

Windows go through these steps: a `TokenStream` copies them from the token files, a `Feed` does so
in a thread, `move_to_device` sends the narrow ids, and `Windows.widen` makes tokens and targets.
"""

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import torch
from torch import Tensor

from lockstep_gpt.data.order import Positions
from lockstep_gpt.data.windows import Stored, Windows

GROUP = 8  # micro-batches to gather and hand over at once, because each call costs microseconds


class Feed(Iterable[Stored]):
    """Loads batches ahead in a thread.

    Attributes:
        waited: seconds that the consumer has waited for batches so far.

    Args:
        batches: loaded in order, each once per iteration.
        group: how many to load at a time.
    """

    def __init__(self, batches: Iterable[Stored], group: int = GROUP) -> None:
        self.batches = batches
        self.group = group
        self.waited = 0.0

    def __iter__(self) -> Iterator[Stored]:
        batches = iter(self.batches)
        with ThreadPoolExecutor(1, "feed") as thread:
            next_group = thread.submit(list, islice(batches, 1))  # one alone comes sooner
            while True:
                group = self._wait_for(next_group)
                if not group:
                    return
                next_group = thread.submit(list, islice(batches, self.group))
                yield from group

    def _wait_for(self, group: Future[list[Stored]]) -> list[Stored]:
        started = time.perf_counter()
        batches = group.result()
        self.waited += time.perf_counter() - started
        return batches


class TokenStream(Iterable[Stored]):
    """Micro-batches of the windows whose numbers `rows` yields.

    Args:
        windows: of one split.
        rows: the windows of each micro-batch, (B,), such as an `Order`.
        pinned: whether to use page-locked memory, for copies to a GPU.
    """

    def __init__(self, windows: Windows, rows: Iterable[Positions], pinned: bool = False) -> None:
        self.windows = windows
        self.rows = rows
        self.pinned = pinned

    def __iter__(self) -> Iterator[Stored]:
        for group in _groups(self.rows):
            yield from self.windows.gather(group, self.pinned)


def _groups(batches: Iterable[Positions]) -> Iterator[list[Positions]]:
    """Yield up to `GROUP` batches at a time."""
    iterator = iter(batches)
    group = list(islice(iterator, GROUP))
    while group:
        yield group
        group = list(islice(iterator, GROUP))


def move_to_device(stored: Stored, device: torch.device) -> Stored:
    """Return a batch on a device; a copy from page-locked memory to a GPU is not awaited."""
    ids = stored.ids
    real = stored.real
    if ids.device == device:
        return stored
    if device.type == "mps":
        ids = ids.int()  # MPS lacks uint16
    continues = device.type == "cuda"  # the host, during the copy
    if isinstance(real, Tensor):
        real = real.to(device, non_blocking=continues)
    return Stored(ids.to(device, non_blocking=continues), real)
