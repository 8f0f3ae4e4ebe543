"""Loads batches ahead of training in a thread of the process."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

GROUP = 8  # batches to hand over at once, because each call costs microseconds


class Feed(Iterable[Any]):
    """Loads batches ahead in a thread.

    Args:
        batches: loaded in order, each once per iteration.
        group: how many to load at a time.
    """

    def __init__(self, batches: Iterable[Any], group: int = GROUP) -> None:
        self.batches = batches
        self.group = group

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.batches)
        with ThreadPoolExecutor(1, "feed") as thread:
            next_group: Future[list[Any]]
            next_group = thread.submit(list, islice(batches, 1))  # one alone comes sooner
            while True:
                group = next_group.result()
                if not group:
                    return
                next_group = thread.submit(list, islice(batches, self.group))
                yield from group


def groups_of(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield up to `GROUP` items at a time."""
    iterator = iter(items)
    group = list(islice(iterator, GROUP))
    while group:
        yield group
        group = list(islice(iterator, GROUP))
