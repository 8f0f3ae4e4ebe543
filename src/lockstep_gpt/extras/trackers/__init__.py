"""More in wandb: histograms, a growing table of samples, alerts, checkpoints and code."""

TRACKED_RUN = "lockstep_gpt.extras.trackers.full_run:tracked_run"
