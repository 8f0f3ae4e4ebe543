"""What users bring along: runs of earlier versions, Lightning's callbacks, others' settings."""

CHECK = ".extras.compat.callbacks:refuse_what_cannot_work"
WORDS = ".extras.compat.words:understood"
EARLIER = ".extras.compat.former:drop_defaults"
OTHER_NAME = ".extras.compat.other_names:here"
CALLBACK = ".extras.compat.time_limit:if_limited"
# Modules, or names in them, that have moved since an earlier version.
_HERE = "lockstep_gpt.training"
_STRATEGIES = "lockstep_gpt.distributed.strategies"
MOVED = {
    "lockstep_gpt.extras.sharding.fsdp2": _STRATEGIES,
    f"{_HERE}.sharding": _STRATEGIES,
    "lockstep_gpt.runtime": "lockstep_gpt.run",
    f"{_HERE}.strategies": _STRATEGIES,
    f"{_HERE}.ranks": _STRATEGIES,
    f"{_HERE}.strategy": _STRATEGIES,
    f"{_HERE}.callbacks.sample": "lockstep_gpt.run.callbacks.progress",
    f"{_HERE}.callbacks": "lockstep_gpt.run.callbacks",
    f"{_HERE}.tracking.wandb_logger": "lockstep_gpt.run.tracking.wandb_logger",
}
