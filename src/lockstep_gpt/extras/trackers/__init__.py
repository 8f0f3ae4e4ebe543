"""TensorBoard, MLflow, and more in wandb: histograms, samples, alerts, checkpoints, and code."""

TRACKED_RUN = "lockstep_gpt.extras.trackers.full_run:tracked_run"
_EVENT_FILES = "lockstep_gpt.extras.trackers.event_files.tensorboard_logger"
MOVED = {
    "lockstep_gpt.training.tracking.tensorboard_logger": _EVENT_FILES,
}
