"""Compares what two checkpoints of the same step contain, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.checkpoints.content import samples_of
from lockstep.checkpoints.reading import read_checkpoint
from lockstep.settings import counted

if TYPE_CHECKING:
    from torch import Tensor

# What a run goes on from. The rest depends on where it was saved, or says what computed it.
COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "means")
SCALARS = ("global_step",)
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def state_of(path: Path, names: list[str]) -> dict[str, Any]:
    """Return the tensors and other values of a checkpoint by what a person calls them.

    Args:
        path: the checkpoint.
        names: of the tensors, in the optimizer's order.

    Raises:
        UserError: it is damaged.
    """
    content = read_checkpoint(path)
    kept = {key: content[key] for key in (*COMPARED, *SCALARS) if key in content}
    kept["samples"] = samples_of(content)
    return {_title(keys, names): value for keys, value in _leaves(kept, ())}


def _leaves(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*keys, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*keys, index))
    else:
        yield keys, value


def _title(keys: tuple[Any, ...], names: list[str]) -> str:
    if keys[0] == "state_dict":
        return str(keys[1])
    if keys[0] == "optimizer_states" and keys[2] == "state":
        return f"the optimizer's {keys[4]} of {names[keys[3]]}"
    return ".".join(map(str, keys))


def differing_numbers(run: dict[str, Any], replay: dict[str, Any]) -> dict[str, str]:
    """Return, for each name whose bits differ, how they do."""
    differing = {}
    for name in {**run, **replay}:
        fault = _difference(run.get(name), replay.get(name))
        if fault:
            differing[name] = fault
    return differing


def _difference(ours: Any, theirs: Any) -> str | None:
    import torch

    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        same = ours == theirs or (ours != ours and theirs != theirs)  # NaN is NaN
        return None if same else f"is {ours}, not {theirs}"
    if ours.numel() != theirs.numel() or ours.dtype != theirs.dtype:
        return f"is {ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    changed = _bits(ours) ^ _bits(theirs)
    places = changed.nonzero().flatten()
    if not len(places):
        return None
    if len(places) > 1:
        return f"differs in {len(places):,} of {counted(ours.numel(), 'number')}"
    place = int(places[0])
    mask = int(changed[place]) & (2 ** (8 * ours.itemsize) - 1)
    bits = [str(bit) for bit in range(8 * ours.itemsize) if mask >> bit & 1]
    label = "bit" if len(bits) == 1 else "bits"
    return f"differs in number {place} of {ours.numel()}, {label} {', '.join(bits)}"


def _bits(tensor: Tensor) -> Tensor:
    import torch

    integers = getattr(torch, INTEGERS[tensor.itemsize])
    return tensor.detach().cpu().contiguous().flatten().view(integers)
