"""Weights of an earlier run, with which a model begins."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.checkpoints.content import WEIGHTS, refuse_broken_weights
from lockstep.checkpoints.reading import read_checkpoint, with_newest
from lockstep.errors import UserError
from lockstep.ranks.ranks import ranks_unlike_rank_zero

logger = logging.getLogger(__name__)


def load_weights(path: str | Path, model: nn.Module, strict: bool = True) -> None:
    """Load the weights of a run or of a checkpoint into a model that has not begun to train.

    The model may be the whole LightningModule, or a part of it, such as its attribute `model`: the
    part with these weights is found. Every rank must call this; each reads the file, and all
    compare what they have read.

        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> run = lockstep.Run.alone()
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> saving = {"callbacks": [lockstep.Checkpoints(run)], "plugins": run.plugins}
        >>> trainer = Trainer(max_steps=1, limit_val_batches=0, logger=False, **saving, **quiet)
        >>> trainer.fit(BoringModel())
        >>> lockstep.load_weights(run.path, BoringModel())

    Args:
        path: a run directory, a checkpoint in one, or wandb://ENTITY/PROJECT/NAME:ALIAS.
        model: gets the weights.
        strict: whether all weights must be there, with the same names and shapes, and no others.
            False: those with the same names and shapes are loaded, and the others stay.

    Raises:
        UserError: there is no such run, its weights don't fit, or ranks have read different ones.
    """
    path = Path(path).expanduser()
    content = with_newest(path, partial(read_checkpoint, needed=WEIGHTS))
    weights = weights_for(model, content["state_dict"], str(path), strict)
    set_weights(model, weights, str(path))
    logger.info("weights of %s: %d of %d", path, len(weights), len(model.state_dict()))


def weights_for(
    model: nn.Module, saved: Mapping[str, Tensor], where: str, strict: bool = True
) -> dict[str, Tensor]:
    """Return those of the saved weights that are a model's, by its names.

    Args:
        model: the whole of what was saved, or a part of it.
        saved: the weights of a whole module.
        where: they are, for errors.
        strict: as in `load_weights`.

    Raises:
        UserError: they don't fit.
    """
    kind = type(model).__name__
    ours = model.state_dict()
    prefix = _prefix_of(ours, saved, where, kind)
    theirs = {
        name.removeprefix(prefix): weight
        for name, weight in saved.items()
        if name.startswith(prefix)
    }
    if not strict:
        return {
            name: weight
            for name, weight in theirs.items()
            if name in ours and weight.shape == ours[name].shape
        }
    remedy = "build the same model"
    for name, weight in ours.items():
        if name not in theirs:
            raise UserError(f"{where} lacks {name}, which {kind} has; {remedy}")
        if theirs[name].shape != weight.shape:
            raise UserError(
                f"{where} has {name} of shape {tuple(theirs[name].shape)}, and {kind} of "
                f"{tuple(weight.shape)}; {remedy}"
            )
    for name in theirs:
        if name not in ours:
            raise UserError(f"{where} has {name}, which {kind} lacks; {remedy}")
    return theirs


def _prefix_of(
    ours: Mapping[str, Tensor], saved: Mapping[str, Tensor], where: str, kind: str
) -> str:
    """Return what comes before our names in the saved ones, such as `model.`; often nothing."""
    counts: Counter[str] = Counter()
    for name in saved:
        words = name.split(".")
        for start in range(len(words)):
            if ".".join(words[start:]) in ours:
                counts[".".join([*words[:start], ""])] += 1
    if not counts:
        raise UserError(f"{where} has no weight of {kind}, such as {next(iter(ours), '')}")
    most = max(counts.values())
    prefixes = [prefix for prefix, count in counts.items() if count == most]
    if len(prefixes) > 1:
        names = ", ".join(prefix.rstrip(".") for prefix in prefixes)
        raise UserError(f"{where} has several parts like {kind}: {names}; load the whole module")
    return prefixes[0]


def restore(model: nn.Module, saved: Mapping[str, Tensor], path: Path, prefix: str = "") -> None:
    """Load a checkpoint's weights into a model that was built for them.

    Args:
        model: gets all of its weights.
        saved: the weights of a whole module.
        path: of the checkpoint, for errors.
        prefix: what the model's names begin with in the checkpoint, such as `model.`.

    Raises:
        UserError: they don't fit, or some are not finite.
    """
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in saved.items()
        if name.startswith(prefix)
    }
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: {reason}; use the code that wrote it") from None
    refuse_broken_weights(model.named_parameters(prefix.rstrip(".")), f"checkpoint {path}")


def set_weights(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Let a model have these weights; every rank must call this.

    Raises:
        UserError: some are not finite, or other ranks have others, as if a folder looks shared
            without being shared.
    """
    refuse_broken_weights(weights.items(), where, "choose others")
    model.load_state_dict(weights, strict=False)
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        numbers = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(numbers.numpy())
    others = ranks_unlike_rank_zero(digest.hexdigest())
    if others:
        raise UserError(
            f"{where} has other weights for rank {others} than for rank 0; name a folder that is "
            "the same on all nodes"
        )
