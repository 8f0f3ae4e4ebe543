"""Batches that loader processes make, `data.num_workers` of each rank."""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lockstep_gpt.config import DataConfig
from lockstep_gpt.data.datamodule import Feed, Rows, TokenDataModule, TokenStream
from lockstep_gpt.data.windows import Stored

WORKER_LIMIT = 300  # seconds that a worker may take for one batch


class SharedStream(IterableDataset[Stored]):
    """A stream that the processes of a loader share; it asks them in turn."""

    def __init__(self, stream: TokenStream) -> None:
        super().__init__()
        self.stream = stream

    def __iter__(self) -> Iterator[Stored]:
        info = get_worker_info()
        assert info, "iterated by a loader's process"
        self.stream.share = info.id, info.num_workers
        return iter(self.stream)


class WorkersDataModule(TokenDataModule):
    """Batches of prepared tokens, made by processes."""

    def __init__(self, workers: int, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.workers = workers
        self._feeds: list[Feed] = []

    def feed(self, split: str, rows: Rows) -> Feed:
        """Return what takes the batches of a split ahead."""
        stream: Any = super().feed(split, rows).batches
        on_gpu, stream.pinned = stream.pinned, False  # by the loader, not by its processes
        loader = DataLoader(
            SharedStream(stream),
            batch_size=None,  # a stream yields whole batches
            collate_fn=tuple,  # which it is: torch's default would make a list of it
            num_workers=self.workers,
            timeout=WORKER_LIMIT,  # a worker that cannot hand over its batch does not end
            pin_memory=on_gpu,
            persistent_workers=True,  # validation comes again and again
            generator=torch.Generator(),  # or an iterator would draw from the run's own
        )
        self._feeds.append(Feed(loader, group=1))
        return self._feeds[-1]

    def teardown(self, stage: str) -> None:  # noqa: ARG002
        """End the processes.

        The garbage collector would take their queues first, and then wait 5 s for each of them.
        """
        for feed in self._feeds:
            if feed.ahead is not None:
                wait([feed.ahead])
            if (iterator := getattr(feed.batches, "_iterator", None)) is not None:
                iterator._shutdown_workers()
        self._feeds.clear()


def data_module(data: DataConfig) -> Callable[..., TokenDataModule] | None:
    """Return what makes the data module of a run with loader processes."""
    workers = getattr(data, "num_workers", 0)
    return partial(WorkersDataModule, workers) if workers else None
