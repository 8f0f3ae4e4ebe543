"""What is in a checkpoint's files: plain containers and tensors; torch is imported lazily."""

import io
import pickle
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf

from lockstep.errors import UserError

# The errors that torch raises for a file it cannot read.
UNREADABLE = (RuntimeError, EOFError, OSError, LookupError, ValueError, struct.error)
# The key that any Trainer needs, those of every reader of ours, and those that a run resumes from.
WEIGHTS = ("state_dict",)
NEEDED = ("config", "state_dict")  # of a run
TO_CONTINUE = (*WEIGHTS, "optimizer_states", "lr_schedulers", "loops", "global_step")
NEEDED_TO_RESUME = ("config", *TO_CONTINUE)
# What a module and its data were built with: Lightning adds that for `load_from_checkpoint`.
ARGUMENTS = ("hyper_parameters", "datamodule_hyper_parameters")
ARGUMENT_TYPES = ("hparams_type", "datamodule_hparams_type")
ORIGIN = "was not written by lockstep"


class CheckpointError(Exception):
    """What is wrong with a checkpoint, as the end of a sentence about it."""


def load_content(path: Path, needed: Collection[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Return the content of a file that matches its SHA-256, or raise a `CheckpointError`.

    The file is mapped: the numbers of tensors are read when they are used, and are in memory once
    for all processes of a machine.

    Args:
        path: the file.
        needed: the keys that it must have.
        map_location: where its tensors go.
    """
    import torch

    if path.stat().st_size == 0:
        raise CheckpointError("is empty")
    is_archive = zipfile.is_zipfile(path)  # cut off, it isn't
    try:
        content = torch.load(path, map_location=map_location, weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"has objects other than tensors and plain values: {_first_line(error)}"
        ) from None
    except UNREADABLE as error:
        if not is_archive:
            raise CheckpointError("is damaged: it is not a whole zip archive") from None
        raise CheckpointError(f"is damaged: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(ORIGIN)
    missing = [name for name in needed if name not in content]
    if missing:
        raise CheckpointError(f"{ORIGIN}: it lacks {', '.join(missing)}")
    containers = [name for name in NEEDED if name in needed]
    wrong = [name for name in containers if not isinstance(content[name], dict)]
    if wrong:
        raise CheckpointError(f"{ORIGIN}: {wrong[0]} is of another type")
    return content


def plain(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return what a checkpoint can have, as it can be read, and the arguments that it can't have.

    `save_hyperparameters` keeps also networks and functions. They are code, which is never read
    from a checkpoint. Containers of Hydra's become plain ones.

    Args:
        content: what Lightning and callbacks want to save.
    """
    kept = {key: value for key, value in content.items() if key not in ARGUMENT_TYPES}
    left_out: list[str] = []
    for key in ARGUMENTS:
        arguments = _without_containers(kept.get(key))
        if isinstance(arguments, dict):
            unfit = [name for name, value in arguments.items() if _unreadable(value, name)]
            kept[key] = {name: arguments[name] for name in arguments if name not in unfit}
            left_out += unfit
    return _without_containers(kept), left_out


def refuse_unreadable(content: dict[str, Any], where: str) -> None:
    """Raise a `UserError` if the checkpoint `where` would have what can't be read again."""
    shard = _shard(content.get("callbacks"), "callbacks")
    if shard is not None:
        raise UserError(
            f"{where} would have {shard}, of which each rank has a shard; save whole tensors, "
            "which value.full_tensor() returns if all ranks call it"
        )
    fault = _unreadable(content, "")
    if fault is not None:
        raise UserError(
            f"{where} would have {fault}, which cannot be read again; save plain values and "
            "tensors in state_dict() and on_save_checkpoint()"
        )


def _without_containers(value: Any) -> Any:
    """Return a value whose containers are Python's own instead of OmegaConf's."""
    if isinstance(value, Container):
        return OmegaConf.to_container(value, resolve=True)
    if type(value) is dict:
        return {key: _without_containers(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_containers, value))
    return value


def _unreadable(value: Any, name: str) -> str | None:
    """Return which part of a value is no plain one, and its kind; None if all are plain."""
    import torch

    if value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor):
        return None
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple | set):
        children = enumerate(value)
    elif not _can_be_read(value):
        return f"{name}, of the kind {type(value).__name__}"
    faults = (_unreadable(child, f"{name}.{key}".strip(".")) for key, child in children)
    return next(filter(None, faults), None)


def _shard(value: Any, name: str) -> str | None:
    """Return which part of a value is a shard of a tensor; None if none is."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return name
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    shards = (_shard(child, f"{name}.{key}") for key, child in children)
    return next(filter(None, shards), None)


def _can_be_read(value: Any) -> bool:
    """Return whether torch reads such a value, as it does for devices and types of numbers."""
    import torch

    if callable(value):  # a network, or a function; a type is read if it is in torch's list
        return False
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, *UNREADABLE, TypeError, AttributeError):
        return False
    return True


def refuse_broken_weights(
    weights: Iterable[tuple[str, Any]], where: str, remedy: str = "use another checkpoint"
) -> None:
    """Raise a `UserError` if a weight of the checkpoint `where` is infinite or not a number."""
    for name, weight in weights:
        # A sum takes a fortieth of the time, but sums of finite numbers may be infinite, too.
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise UserError(f"{where} has weights that are not finite, such as {name}; {remedy}")


def _first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0].partition(". ")[0]


@dataclass(frozen=True)
class SavedShards:
    """A tensor in several files: slices along the first dimension, in the order of the ranks."""

    shards: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        rows = sum(len(shard) for shard in self.shards)
        return (rows, *self.shards[0].shape[1:])

    def __getitem__(self, rows: slice) -> Any:
        """Return a slice of rows; if they are in one file, it isn't copied."""
        import torch

        first, last, _ = rows.indices(self.shape[0])
        pieces = []
        start = 0
        for shard in self.shards:
            pieces.append(shard[max(first - start, 0) : max(last - start, 0)])
            start += len(shard)
        filled = [piece for piece in pieces if len(piece)] or pieces[:1]
        if len(filled) == 1:
            return filled[0]
        return torch.cat(filled)


def shards_of(tensor: Any) -> tuple[Any, ...]:
    """Return the tensors that make up a saved one, which is often whole."""
    shards: tuple[Any, ...] = getattr(tensor, "shards", (tensor,))
    return shards


def joined(states: Any) -> Any:
    """Return nested containers in which each tensor is whole."""
    if isinstance(states, dict):
        return {key: joined(state) for key, state in states.items()}
    if isinstance(states, list):
        return [joined(state) for state in states]
    if isinstance(states, SavedShards):
        return states[:]
    return states


def add_parts(content: dict[str, Any], path: Path) -> None:
    """Put the shards in the ranks' parts, which are next to the checkpoint `path`, in `content`."""
    import torch

    names = content.pop("parts")
    parts = [torch.load(path.with_name(name), weights_only=True, mmap=True) for name in names]
    add_shards(content, parts)


def add_shards(content: Any, parts: list[dict[Any, Any]]) -> None:
    """Put into nested containers the tensors whose shards are at the same place in `parts`."""
    import torch

    for key, first_shard in parts[0].items():
        shards = [part[key] for part in parts]
        if isinstance(first_shard, torch.Tensor):
            content[key] = SavedShards(tuple(shards))
        else:
            add_shards(content[key], shards)


def samples_of(content: Mapping[str, Any]) -> int | None:
    """Return how many samples a run has trained on, as its only loader has counted them."""
    state = content.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    loaders = state.get("combined_loader") or []
    if len(loaders) != 1 or "samples" not in loaders[0]:
        return None
    return int(loaders[0]["samples"])
