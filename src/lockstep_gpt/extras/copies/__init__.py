"""Checkpoints written in the background, copied to another location, or fetched from wandb."""

# Group of settings -> its class with this extra.
SETTINGS = {"checkpoint": ".extras.copies.copies_settings:CopiedCheckpoints"}
CHECKPOINT_IO = ".extras.copies.writing:checkpoint_io"
# For a run that lost its own checkpoints.
FETCH_CHECKPOINT = ".extras.copies.remote:fetch"
# For `wandb://...`.
DOWNLOAD = ".extras.copies.remote:download"
