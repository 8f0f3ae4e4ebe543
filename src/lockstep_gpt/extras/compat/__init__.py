"""What users bring along: runs of earlier versions, Lightning's callbacks, others' settings."""

CHECK = ".extras.compat.callbacks:refuse_what_cannot_work"
WORDS = ".extras.compat.words:understood"
EARLIER = ".extras.compat.former:drop_defaults"
OTHER_NAME = ".extras.compat.other_names:here"
CALLBACK = ".extras.compat.time_limit:if_limited"
CHECK_START = ".extras.compat.arguments:refuse_unknown_arguments"
# Modules, or names in them, that have moved since an earlier version.
_HERE = "lockstep_gpt.training"
MOVED = {
    f"{_HERE}.ranks": f"{_HERE}.strategies",
    f"{_HERE}.strategy": f"{_HERE}.strategies",
    f"{_HERE}.callbacks.sample": "lockstep_gpt.runtime.callbacks.progress",
    f"{_HERE}.callbacks": "lockstep_gpt.runtime.callbacks",
    f"{_HERE}.tracking.wandb_logger": "lockstep_gpt.runtime.tracking.wandb_logger",
}
