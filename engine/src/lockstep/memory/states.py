"""Reads states in shared memory: tensors are views of a file, whose pages all ranks share."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoints.content import UNREADABLE, add_shards
from lockstep.memory.files import (
    HEADER_BYTES,
    KeptState,
    SharedMemoryError,
    digest_of,
)
from lockstep.strategies.state_keys import SHAPES, SHARDS


@dataclass(frozen=True)
class Place:
    """Where a tensor's numbers are: it stands for the tensor in a slot's containers."""

    start: int  # bytes after the header
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of numbers, which have no gaps between them

    def view_of(self, content: Tensor) -> Tensor:
        """Return the tensor as a view of a slot's bytes."""
        count = torch.Size(self.shape).numel()
        stored = content[self.start : self.start + count * self.dtype.itemsize].view(self.dtype)
        return stored.as_strided(self.shape, self.stride)


def read_state(state: KeptState) -> dict[str, Any]:
    """Return the containers and tensors of a state in this machine's memory.

    Its large tensors are views of the file, whose pages all processes of a machine share: copy
    those that you keep.

    Raises:
        SharedMemoryError: it is gone, or its containers have more than tensors and values.
    """
    if state.parts:
        return _joined([read_state(part) for part in state.parts])
    header = state.header
    content = mapped(state)
    packed = content[header.containers_at :].numpy().tobytes()
    try:
        with torch.serialization.safe_globals([Place]):
            containers = torch.load(io.BytesIO(packed), weights_only=True)
    except (pickle.UnpicklingError, *UNREADABLE) as error:
        raise SharedMemoryError(f"{state.path} cannot be read ({error})") from None
    filled: dict[str, Any] = _filled(containers, content)
    return filled


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a state whose tensors are `SavedShards` of all ranks, of what these have kept."""
    state = {key: value for key, value in parts[0].items() if key not in (SHARDS, SHAPES)}
    add_shards(state, [part[SHARDS] for part in parts])
    return state


def _filled(value: Any, content: Tensor) -> Any:
    if isinstance(value, Place):
        return value.view_of(content)
    if isinstance(value, dict):
        for name, item in value.items():
            value[name] = _filled(item, content)
        return value
    if type(value) in (list, tuple):
        return type(value)(_filled(item, content) for item in value)
    return value


def is_intact(state: KeptState) -> bool:
    """Return whether all bytes of a state are those that were written."""
    try:
        content = mapped(state)
    except SharedMemoryError:
        return False
    return digest_of(content.numpy(), state.header.containers_at) == state.header.digest


def mapped(state: KeptState) -> Tensor:
    """Return the bytes of a state after its header; what this process changes stays its own."""
    size = HEADER_BYTES + state.header.size
    try:
        if state.path.stat().st_size < size:
            raise SharedMemoryError(f"{state.path} is cut off")
        # Private: torch takes no view of what can't be written.
        mapped = torch.from_file(str(state.path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise SharedMemoryError(f"{state.path} cannot be read ({error})") from None
    return mapped[HEADER_BYTES:]
