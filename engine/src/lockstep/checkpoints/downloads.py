"""Checkpoints that runs logged to wandb."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.errors import UserError

REFERENCE = re.compile(r"wandb:/{1,2}(.+)")  # a `Path` keeps only one slash
SECONDS = 10  # for wandb to answer


def download(source: Path, folder: Path | None) -> Path | None:
    """Download a checkpoint that a run logged; return its file.

    Args:
        source: wandb://ENTITY/PROJECT/NAME:ALIAS; for anything else, None is returned.
        folder: the target; None: wandb's own, `artifacts/`.

    Raises:
        UserError: there is none, or it can't be reached.
    """
    match = REFERENCE.fullmatch(str(source))
    if match is None:
        return None
    import wandb

    reference = match[1]
    try:
        artifact = wandb.Api(timeout=SECONDS).artifact(reference, type="model")
        target = str(folder) if folder else None
        downloaded = Path(artifact.download(target))
    except Exception as error:  # wandb's own errors, the network's and the disk's
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"wandb://{reference} cannot be downloaded: {reason}; give ENTITY/PROJECT/NAME:ALIAS "
            "of a checkpoint, and log in with `wandb login`"
        ) from error
    (path,) = downloaded.glob("*.ckpt")
    return path
