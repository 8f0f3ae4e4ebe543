"""More in wandb: histograms, a table of samples that grows, checkpoints and code as artifacts."""

TRACKED_RUN = "lockstep_gpt.extras.trackers.full_run:tracked_run"
