"""Checkpoints that are written in the background, copied elsewhere, or fetched from wandb."""

CHECKPOINT_IO = "lockstep_gpt.extras.copies.writing:checkpoint_io"
# Where a run has lost its own.
FETCH_CHECKPOINT = "lockstep_gpt.extras.copies.remote:fetch"
# Of what `wandb://...` names.
DOWNLOAD = "lockstep_gpt.extras.copies.remote:download"
