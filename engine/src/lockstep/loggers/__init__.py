"""What trackers get of a run, and what happens when one hangs.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.loggers.tracking import tracked_runs
    from lockstep.loggers.wandb_run import WandbRun

__all__ = [
    "WandbRun",
    "tracked_runs",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "WandbRun": "lockstep.loggers.wandb_run:WandbRun",
        "tracked_runs": "lockstep.loggers.tracking:tracked_runs",
    },
)
