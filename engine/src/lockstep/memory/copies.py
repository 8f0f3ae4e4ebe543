"""Copies a state's tensors to a slot: at once on CPUs, next to training on GPUs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


class DeviceCopies:
    """Copies that a GPU does on a stream of its own, while it computes the next step's gradients.

    The next update waits for them, as it changes weights and moments. Other tensors, such as the
    statistics of BatchNorm, change earlier: the stream of training copies these itself.
    """

    def __init__(self) -> None:
        self.updated: Collection[int] = ()  # addresses of tensors that only an update changes
        self._stream: Any = None
        self._copied: Any = None  # an event, at the end of the copies
        self._pinned: set[int] = set()  # addresses of memory to which GPUs copy directly

    def pin(self, content: Tensor) -> None:
        """Let GPUs copy to `content` while the host goes on; without, the host waits for them."""
        address = content.data_ptr()
        if not torch.cuda.is_initialized() or address in self._pinned:  # type: ignore[no-untyped-call]
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostRegister(address, content.nbytes, 0)
        self._pinned.add(address)

    def start(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy each source to its target in host memory; those of a GPU are copied later."""
        beside = []
        for target, source in zip(targets, sources, strict=True):
            if source.is_cuda and source.data_ptr() in self.updated:
                beside.append((target, source))
            else:
                target.copy_(source, non_blocking=True)
        if not any(source.is_cuda for source in sources):
            return
        current = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, source in beside:
                target.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()

    def hold_update(self) -> None:
        """Let the stream of training wait for the copies before its next update."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def unpin(self) -> None:
        """Release all pinned memory, before it is unmapped."""
        for address in self._pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)
        self._pinned.clear()

    def wait(self) -> None:
        """Wait until all copies are in host memory."""
        if self._copied is not None:
            self._copied.synchronize()
