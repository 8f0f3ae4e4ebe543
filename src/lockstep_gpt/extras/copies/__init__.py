"""Checkpoints that are written in the background, copied elsewhere, or fetched from wandb."""

CHECKPOINT_IO = ".extras.copies.writing:checkpoint_io"
# Where a run has lost its own.
FETCH_CHECKPOINT = ".extras.copies.remote:fetch"
# Of what `wandb://...` names.
DOWNLOAD = ".extras.copies.remote:download"
