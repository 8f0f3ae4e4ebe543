"""Checkpoints that are written in the background, copied elsewhere, or fetched from wandb."""

# Group of settings -> what it takes with this extra.
SETTINGS = {"checkpoint": ".extras.copies.copies_settings:CopiedCheckpoints"}
CHECKPOINT_IO = ".extras.copies.writing:checkpoint_io"
# Where a run has lost its own.
FETCH_CHECKPOINT = ".extras.copies.remote:fetch"
# Of what `wandb://...` names.
DOWNLOAD = ".extras.copies.remote:download"
