"""Settings of the batch: the arguments of `Batch`, as a group of the configuration."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.batch import MOST_THREADS, Batch
from lockstep_gpt.settings import Checked, setting


@dataclass
class BatchConfig(Checked):
    """How many samples an optimizer step uses; `Batch` checks it and does the arithmetic."""

    node: ClassVar[str] = "batch"
    micro_size: int | None = setting(
        "samples per device and micro-batch; null: a device's part of global_size", None, at_least=1
    )
    global_size: int | None = setting(
        "samples per optimizer step; null: micro_size x devices at the first start",
        None,
        on_resume="kept",
        at_least=1,
    )
    reference_size: int = setting("global batch for which optim.lr was tuned", 12, at_least=1)
    exact_micro_size: int | None = setting(
        "samples per micro-batch, for equal bits on any number of devices; null: equal up to "
        "rounding",
        None,
        on_resume="kept",
        at_least=1,
    )
    exact_threads: int = setting(
        "CPU threads per rank with exact_micro_size",
        1,
        on_resume="kept",
        at_least=1,
        at_most=MOST_THREADS,
    )

    def __post_init__(self) -> None:
        """Also check that the sizes fit together."""
        super().__post_init__()
        self.build()
        if self.exact_micro_size is not None:
            self.micro_size = self.exact_micro_size

    def build(self) -> Batch:
        """Return the batch that these settings describe, on any devices."""
        return Batch(
            self.global_size,
            self.micro_size,
            reference_size=self.reference_size,
            exact_micro_size=self.exact_micro_size,
            exact_threads=self.exact_threads,
        )
