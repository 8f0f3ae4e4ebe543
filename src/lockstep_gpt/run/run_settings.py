"""Settings of checkpoints, and of the guards that end a run which does harm."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import Checked, setting


@dataclass
class CheckpointConfig(Checked):
    """When a run saves its state, and what it keeps."""

    node: ClassVar[str] = "checkpoint"
    every: int | None = setting(
        "optimizer steps between checkpoints; null: only at the end, and the best", 500, at_least=1
    )
    keep_last: int = setting("how many of the newest checkpoints to keep", 1, at_least=1)
    keep_best: int = setting(
        "how many of the best checkpoints to keep, by checkpoint.monitor; saved at most once in "
        "checkpoint.every steps",
        1,
        at_least=0,
    )
    monitor: str = setting("logged metric that decides which are the best", "val/loss")
    mode: str = setting("which value is the best", "min", choices=("min", "max"))
    background: bool = setting("write a copy of the state while training continues", False)
    copy_to: str | None = setting("also keep checkpoints in this folder or fsspec URL", None)
    memory: int | str | bool = setting(
        "also keep the newest state in each machine's memory: every so many steps, or auto: with "
        "several ranks, in 1 % of the time",
        "auto",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        value = self.memory
        is_count = type(value) is int and value >= 1
        if not is_count and value != "auto" and value is not False:
            self.refuse("memory", "is neither auto, false, nor a number of steps")


@dataclass
class GuardConfig(Checked):
    """When a run stops because something is wrong."""

    node: ClassVar[str] = "guard"
    max_skipped: int = setting(
        "non-finite updates to skip before failing (in 16-mixed: at loss scale <= 1)",
        0,
        at_least=0,
    )
    replicas_every: int | None = setting(
        "steps between comparisons of the ranks' weights; null: only at saves", 500, at_least=1
    )
    trace: bool = setting(
        "write sums of each step's bits to trace.csv, to find the first micro-batch and tensor "
        "that differ in another run",
        False,
    )
    verify_every: int | None = setting(
        "recompute a micro-batch of one random step in this many on another rank, and end the run "
        "if a bit differs; null: never",
        None,
        at_least=1,
    )
    stall_after: float | None = setting(
        "seconds without a step until ranks show their stacks and the run ends; null: no limit",
        1800.0,
        above=0,
    )
    tracker_seconds: float = setting(
        "seconds for a call of a tracker, such as wandb, until the run goes on without it; at most "
        "half of launch.grace_seconds and of guard.stall_after",
        30.0,
        above=0,
    )
