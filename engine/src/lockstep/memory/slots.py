"""Slots: files in shared memory to which a rank copies a run's state.

A writer has two, which alternate: while it overwrites one, the other is complete. Their pages stay,
so a copy costs no more than moving the bytes.
"""

from __future__ import annotations

import copy
import io
import mmap
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.memory.files import (
    HEADER_BYTES,
    SEAL_BYTES,
    Header,
    Identity,
    SharedMemoryError,
    digest_of,
)
from lockstep.memory.room import bytes_left
from lockstep.memory.states import Place

ALIGNMENT = 64  # bytes; where vector instructions are fastest
# Values that nothing changes in place.
IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


class Layout:
    """The containers of a state, in which each tensor is replaced by its place.

    Args:
        state: nested containers, which may change after this returns; the tensors may not, until
            they are copied.
    """

    def __init__(self, state: Any) -> None:
        self.size = 0  # bytes of all tensors, with gaps
        self.tensors: dict[Place, Tensor] = {}
        self._seen: dict[Any, Place] = {}  # of tensors that occur twice, such as tied weights
        self.containers = self._replaced(state)

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, IMMUTABLE):
            return value
        if isinstance(value, Tensor):
            return self._place(value)
        if isinstance(value, dict):
            replaced = copy.copy(value)  # of the same type, with its attributes
            replaced.update({name: self._replaced(item) for name, item in value.items()})
            return replaced
        if type(value) in (list, tuple):
            return type(value)(self._replaced(item) for item in value)
        return copy.deepcopy(value)

    def _place(self, tensor: Tensor) -> Any:
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized:
            return tensor.detach().clone()
        shape = tuple(tensor.shape)
        identity = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride())
        if identity not in self._seen:
            stride = tensor.stride()
            if not tensor.is_contiguous():
                stride = torch.empty_like(tensor, device="meta").stride()
            place = Place(self.size, tensor.dtype, shape, stride)
            self.size = _aligned(self.size + tensor.nbytes)
            self._seen[identity] = place
            self.tensors[place] = tensor.detach()
        return self._seen[identity]


def copy_now(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


class Slot:
    """One file of a writer, which only this process writes.

    Args:
        path: of the file. One that is there is overwritten, which saves the time for new pages.
        is_read: replace it instead, because ranks still read it.
    """

    def __init__(self, path: Path, is_read: bool = False) -> None:
        self.path = path
        if is_read:
            path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        self.capacity = 0  # bytes after the header
        self._map: Any = None
        self._content = torch.empty(0, dtype=torch.uint8)
        self._views: dict[Place, Tensor] = {}  # made once: places stay from state to state

    def reserve(self, size: int) -> None:
        """Take memory for `size` bytes after the header, or raise a `SharedMemoryError`."""
        if self._map is not None and size <= self.capacity:
            return
        size = _aligned(size + size // 64)  # containers grow by some bytes
        missing = max(0, HEADER_BYTES + size - os.fstat(self._descriptor).st_size)
        left = bytes_left()
        if missing > left:
            raise SharedMemoryError(
                f"a state needs {missing:,} bytes more, but this machine has {left:,} left"
            )
        try:
            # At once: writing to a page that there isn't would kill the process.
            os.posix_fallocate(self._descriptor, 0, HEADER_BYTES + size)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # the first copy is as fast
            self._map = mmap.mmap(self._descriptor, HEADER_BYTES + size, flags)
        except OSError as error:
            raise SharedMemoryError(
                f"{self.path.parent.parent} has no room for {missing:,} bytes more "
                f"({error.strerror}; docker run --shm-size=8g enlarges it)"
            ) from None
        self.capacity = size
        self._content = torch.frombuffer(self._map, dtype=torch.uint8)[HEADER_BYTES:]
        self._views = {}
        self.unseal()

    @property
    def content(self) -> Tensor:
        """The bytes after the header."""
        return self._content

    def fill(self, layout: Layout, copy_tensors: Callable[..., None] = copy_now) -> None:
        """Start to overwrite the slot with a state's tensors; until `seal`, it is no state."""
        self.empty(layout.size)
        views = [self._view_of(place) for place in layout.tensors]
        copy_tensors(views, [*layout.tensors.values()])

    def _view_of(self, place: Place) -> Tensor:
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = place.view_of(self._content)
        return view

    def seal(
        self, layout: Layout, identity: Identity, step: int, part: dict[str, int] | None = None
    ) -> Header:
        """Complete the state whose tensors are in the slot; another thread may call this.

        Args:
            layout: has its containers.
            identity: of the run.
            step: the optimizer step after which it was taken.
            part: which part of the state it is; None: all of it.

        Raises:
            SharedMemoryError: there is no more memory, or the containers can't be saved.
        """
        file = io.BytesIO()
        try:
            torch.save(layout.containers, file)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise SharedMemoryError(f"the state cannot be saved ({error})") from None
        packed = file.getbuffer()
        size = layout.size + len(packed)
        self.reserve(size)
        content = memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + size]
        content[layout.size :] = packed
        digest = digest_of(content, layout.size)
        header = Header(identity, step, layout.size, size, digest, part or {})
        self.write_header(header)
        return header

    def empty(self, size: int) -> Tensor:
        """Mark the slot as incomplete; return the place of `size` bytes after the header."""
        self._refuse_removed()
        self.reserve(size)
        self.unseal()
        return self._content[:size]

    def unseal(self) -> None:
        """Mark the slot as incomplete."""
        self._map[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def write_header(self, header: Header) -> None:
        """Mark the slot as complete, once all its bytes are there."""
        packed = header.pack()
        self._map[SEAL_BYTES : len(packed)] = packed[SEAL_BYTES:]
        self._map[:SEAL_BYTES] = packed[:SEAL_BYTES]

    def _refuse_removed(self) -> None:
        """Raise a `SharedMemoryError` if the file is gone: nobody would find the state."""
        try:
            is_same = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except OSError:
            is_same = False
        if not is_same:
            raise SharedMemoryError(f"{self.path} was removed")

    def close(self) -> None:
        """Close the file; its state stays."""
        os.close(self._descriptor)


class SlotPair:
    """The two slots of one writer.

    Args:
        folder: of the run.
        name: of this writer among those of the folder.
        kept: a complete state that stays until the first new one; its file may be one of these.
    """

    def __init__(self, folder: Path, name: str, kept: Path | None = None) -> None:
        self._paths = [folder / f"{name}.{number}" for number in range(2)]
        self._kept = kept
        if kept == self._paths[0]:
            self._paths.reverse()
        self._slots: list[Slot | None] = [None, None]
        self._next = 0

    def reserve(self, size: int) -> None:
        """Take the memory for `size` bytes in each slot, as far as nothing else is kept there."""
        for number, path in enumerate(self._paths):
            if path != self._kept:
                self._slot(number).reserve(size)

    def prepare_next(self, size: int) -> None:
        """Take the memory for `size` bytes in the slot that is overwritten next."""
        self._slot(self._next).reserve(size)

    def _slot(self, number: int) -> Slot:
        slot = self._slots[number]
        if slot is None:
            slot = self._slots[number] = self._new_slot(self._paths[number])
        return slot

    def _new_slot(self, path: Path) -> Slot:
        try:
            return Slot(path, is_read=path == self._kept)
        except OSError as error:
            raise SharedMemoryError(f"{path} cannot be made ({error.strerror})") from None

    def close(self) -> None:
        """Close the files; their states stay."""
        for slot in filter(None, self._slots):
            slot.close()

    def next_slot(self) -> Slot:
        """Return the slot of the older state, which is overwritten next."""
        slot = self._slot(self._next)
        self._next = 1 - self._next
        return slot


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
