"""Checkpoints that are written in the background, copied elsewhere, or fetched from wandb."""

CHECKPOINT_IO = "lockstep_gpt.extras.copies.writing:CopyingCheckpointIO"
FETCH_CHECKPOINT = "lockstep_gpt.extras.copies.remote:fetch_newest"  # where a run has lost its own
DOWNLOAD = "lockstep_gpt.extras.copies.remote:download"  # of what `wandb://...` names
