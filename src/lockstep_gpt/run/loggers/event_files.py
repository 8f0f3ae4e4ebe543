"""`logger=tensorboard`."""

from __future__ import annotations

from lightning.pytorch.loggers import TensorBoardLogger

from lockstep_gpt.run.directory import RunDirectory


def tensorboard_logger(*, directory: RunDirectory) -> TensorBoardLogger:
    """Return a logger that writes to the run directory."""
    return TensorBoardLogger(
        directory.path, name="tensorboard", version="", default_hp_metric=False
    )
