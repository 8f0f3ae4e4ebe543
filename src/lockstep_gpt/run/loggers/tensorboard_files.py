"""`logger=tensorboard`: files for TensorBoard in the run directory."""

from __future__ import annotations

from lightning.pytorch.loggers import TensorBoardLogger

from lockstep_gpt.optional import import_optional
from lockstep_gpt.run.directory import RunDirectory


def tensorboard_logger(*, directory: RunDirectory) -> TensorBoardLogger:
    """Return Lightning's logger, which writes to the folder `tensorboard` of the run directory."""
    import_optional("logger=tensorboard", "tensorboard", "tensorboard")
    return TensorBoardLogger(
        directory.path, name="tensorboard", version="", default_hp_metric=False
    )
