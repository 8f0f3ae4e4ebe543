"""Checkpoints on the disk: written whole or not at all, verified before they are read."""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lockstep_gpt.config import OPEN_GROUPS, Config, RunError, UserError, from_container
from lockstep_gpt.data import tokenizer
from lockstep_gpt.model.gpt import GPT, build_gpt
from lockstep_gpt.registry import additions, asked
from lockstep_gpt.run_directory import REFERENCE, RunDirectory, refuse_missing
from lockstep_gpt.training.ranks import Ranks, from_rank_zero
from lockstep_gpt.whole_files import replace_text, replacing

logger = logging.getLogger(__name__)

# What torch raises for a file that it cannot read.
UNREADABLE = (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, struct.error)
MEND = "then go on with resume=auto from the newest, which is whole"
NAME = re.compile(r"step=(\d{6,})\.ckpt")
PART = re.compile(r"step=\d{6,}\.\d{5,}-of-\d{5,}\.part")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of optimizer step `step` belongs."""
    return folder / f"step={step:06d}.ckpt"


def step_of(path: Path) -> int:
    """Return the optimizer step that a checkpoint's name states."""
    name = NAME.fullmatch(path.name)
    assert name, path
    return int(name[1])


def sum_path(path: Path) -> Path:
    """Return the file that holds the SHA-256 of a checkpoint."""
    return path.with_name(path.name + ".sha256")


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: its sum, its ranks' parts if it has some, and itself."""
    parts = (path.with_name(name) for name in _sums(path) if name != path.name)
    return [sum_path(path), *parts, path]


def _sums(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each of a checkpoint's files; empty where there is no sound sum."""
    try:
        lines = sum_path(path).read_text(encoding="ascii").splitlines()
        sums = {name: digest for digest, name in map(str.split, lines)}
    except (OSError, ValueError):
        return {}
    # No other file is read or deleted for what a sum says.
    return sums if all(name == path.name or PART.fullmatch(name) for name in sums) else {}


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, by step, oldest first."""
    return sorted(
        (path for path in folder.glob("*.ckpt") if NAME.fullmatch(path.name)), key=step_of
    )


def write_checkpoint(
    content: dict[str, Any], path: Path, parts: dict[str, str] | None = None
) -> None:
    """Write a checkpoint and its sum.

    Args:
        content: plain containers and tensors.
        path: its final name, which never holds half a file.
        parts: name -> SHA-256 of what other ranks have written beside it, and belongs to it.

    Raises:
        RunError: the disk is full or cannot be written; what was there before stays.
    """
    write_file(content, path, lambda digest: _write_sum(path, {path.name: digest, **(parts or {})}))


def write_file(
    content: dict[str, Any], path: Path, before: Callable[[str], None] = lambda _: None
) -> str:
    """Write beside, fsync, tell `before` the SHA-256, then rename; return the SHA-256.

    Raises:
        RunError: the disk is full or cannot be written; what was there before stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        refuse_full_disk(path.parent, size_of(content))
        with replacing(path) as file:
            torch.save(content, file)
            file.flush()
            digest = _sha256(Path(file.name))
            before(digest)
        return digest
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"checkpoint {path} cannot be written: {reason}; "
            f"make the folder writable, with room in it, {MEND}"
        ) from error


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise a `RunError` if `needed` bytes have no room in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunError(
            f"{folder} has {free:,} bytes left, a checkpoint takes {needed:,}; "
            f"make room there, {MEND}"
        )


def size_of(content: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, dict) else content
    return sum(map(size_of, parts)) if isinstance(content, dict | list | tuple) else 0


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint's files; the sum last, so that no file stands unverified."""
    for each in reversed(files_of(path)):
        each.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Delete what processes that were killed while writing have left."""
    for path in folder.glob(".step=*.tmp"):
        path.unlink()
    for part in folder.glob("step=*.part"):
        if not part.with_name(part.name.partition(".")[0] + ".ckpt").exists():
            part.unlink()


def _write_sum(path: Path, sums: dict[str, str]) -> None:
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]  # for sha256sum --check
    replace_text(sum_path(path), "".join(lines))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault_of(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None if it is what its SHA-256 says."""
    if not path.is_file():
        return "is missing"
    sums = _sums(path)
    if path.name not in sums:
        return "has no SHA-256 beside it"
    for name, digest in sums.items():
        part = path.with_name(name)
        if not part.is_file():
            return f"misses {name}"
        if _sha256(part) != digest:
            which = "" if part == path else f"has a {name} that "
            return f"{which}is not what its SHA-256 says"
    return None


def newest_valid(folder: Path) -> Path | None:
    """Return the newest checkpoint in `folder` that verifies; name in the log what it skips."""
    for path in reversed(checkpoints_in(folder)):
        fault = fault_of(path)
        if fault is None:
            return path
        logger.warning("skipped %s: it %s", path, fault)
    return None


def read_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Load plain containers and tensors; anything else in the file is refused, never run.

    Raises:
        UserError: the file is missing, damaged, or no checkpoint of this project.
    """
    if fault := fault_of(path):
        raise UserError(f"checkpoint {path} {fault}; take another one from the same folder")
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except UNREADABLE as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"checkpoint {path} holds more than tensors and values: {reason}") from None
    if not isinstance(content, dict) or not {"config", "tokenizer", "state_dict"} <= set(content):
        raise UserError(f"checkpoint {path} was not written by lockstep-gpt train")
    if "parts" in content:
        if not any(additions("JOIN_PARTS")):
            raise UserError(f"checkpoint {path} is in parts, which an extra reads that is not here")
        asked("JOIN_PARTS", content, path)
    return content


def find_checkpoint(path: Path, folder: Path | None = None) -> Path:
    """Return the checkpoint that a user means.

    Args:
        path: a run directory, a checkpoint, or `wandb://ENTITY/PROJECT/NAME:ALIAS`.
        folder: where such a one is downloaded to; None: wandb's own, `artifacts/`.

    Raises:
        UserError: there is none.
    """
    if reference := REFERENCE.fullmatch(str(path)):
        found: list[Path] = asked("DOWNLOAD", reference[1], folder)
        if not found:
            raise UserError(f"{path} needs an extra that is not here; give a run or a checkpoint")
        return found[0]
    refuse_missing(path)
    if path.is_file():
        return path
    newest = newest_valid(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path} holds no checkpoint that verifies; give a run that has saved one")
    return newest


def copies_of(directory: RunDirectory, config: Config) -> str | None:
    """Return where copies of this run's checkpoints go."""
    url = config.checkpoint.copy_to
    return f"{url.rstrip('/')}/{directory.path.name}" if url else None


def state_to_resume(directory: RunDirectory, config: Config, module: torch.nn.Module) -> str | None:
    """Return the checkpoint to go on from: the run's own newest, else what `resume` names.

    Every rank must call this; rank 0 looks, and the others are told.
    """
    first = Ranks.from_environment().rank == 0
    own = from_rank_zero(str(_own_newest(directory, config, module) or "") if first else "")
    if own or config.resume in ("none", "auto"):
        return own or None
    asked_for = Path(config.resume)
    found = find_checkpoint(asked_for, directory.path / "artifacts") if first else ""
    path = Path(from_rank_zero(str(found)))
    content = read_checkpoint(path)
    if not config.resume_force:
        refuse_another_identity(path, content["config"], directory.values())
    if fits(module, content):
        return str(path)
    taken = adopt_weights(module, content)
    logger.warning("resume_force: took %d weights of %s, the rest is new", taken, path)
    return None


def _own_newest(directory: RunDirectory, config: Config, module: torch.nn.Module) -> Path | None:
    """Tidy up after a run that was killed; return its newest checkpoint that verifies."""
    remove_leftovers(directory.checkpoints)
    refuse_full_disk(directory.path, 3 * size_of(module.state_dict()))  # AdamW: two moments each
    newest, copies = newest_valid(directory.checkpoints), copies_of(directory, config)
    if newest is None and copies and config.resume == "auto":
        return next(iter(asked("FETCH_CHECKPOINT", copies, directory.checkpoints)), None)
    return newest


def load_model(path: Path) -> tuple[GPT, Config, tokenizer.Tokenizer]:
    """Return the model of a checkpoint in evaluation mode, its configuration and tokenizer."""
    content = read_checkpoint(path)
    values = {name: each for name, each in content["config"].items() if name not in OPEN_GROUPS}
    config = from_container(values)  # without what a model does not need, and its references
    text = tokenizer.from_dict(content["tokenizer"])
    model = build_gpt(config.model, text.vocab_size)
    prefix = "model."
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in content["state_dict"].items()
        if name.startswith(prefix)
    }
    model.load_state_dict(weights)
    return model.eval(), config, text


def realign(checkpoint: dict[str, Any], accumulation: int) -> None:
    """Make Lightning's count of micro-batches that of this run at the saved optimizer step.

    With another number of devices a step has another number of micro-batches, and Lightning,
    which only counts these, would end its next steps in the wrong places.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    batches = checkpoint["global_step"] * accumulation
    for part in ("total", "current"):
        progress[part] = dict.fromkeys(progress[part], batches)


def apply_settings(
    checkpoint: dict[str, Any], optimizer: torch.optim.Optimizer, factor: float
) -> None:
    """Put this run's settings of the optimizer in the place of the saved ones.

    Torch saves them with the state and would restore them, so that a new `optim.lr` of a resumed
    run would silently do nothing. `factor` is the schedule's at the step to come.
    """
    for state in checkpoint["optimizer_states"]:
        for saved, ours in zip(state["param_groups"], optimizer.param_groups, strict=True):
            settings = {name: ours[name] for name in saved if name != "params"}
            saved.update(settings, lr=factor * ours["initial_lr"])
    for state in checkpoint["lr_schedulers"]:
        state["base_lrs"] = [group["initial_lr"] for group in optimizer.param_groups]


def refuse_another_identity(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Raise a `UserError` if a checkpoint is of another model or data set than this run's."""
    for group, harmless in (
        ("model", {"dropout", "activation_checkpointing", "init_from"}),
        ("data", {"root", "num_workers", "val_tokens"}),
    ):
        for name in sorted({*saved[group], *ours[group]} - harmless):
            was, is_now = saved[group].get(name), ours[group].get(name)
            if was != is_now:
                raise UserError(
                    f"resume={path} has {group}.{name}={was}, this run {is_now}; set it alike, or "
                    "set resume_force=true"
                )


def fits(module: torch.nn.Module, content: dict[str, Any]) -> bool:
    """Tell whether every saved weight has its place in `module`, and every place its weight."""
    names = content["state_dict"].keys()
    return bool(_fitting(module, content).keys() == names == module.state_dict().keys())


def adopt_weights(module: torch.nn.Module, content: dict[str, Any]) -> int:
    """Copy the weights that fit into `module`; return how many did."""
    fitting = _fitting(module, content)
    module.load_state_dict(fitting, strict=False)
    return len(fitting)


def _fitting(module: torch.nn.Module, content: dict[str, Any]) -> dict[str, torch.Tensor]:
    places = module.state_dict()
    return {
        name: weight
        for name, weight in content["state_dict"].items()
        if name in places and places[name].shape == weight.shape
    }
