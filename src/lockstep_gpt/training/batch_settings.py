"""Settings of the batch."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import Checked, setting


@dataclass
class BatchConfig(Checked):
    """How many samples an optimizer step uses; `training/schedule.py` does the arithmetic."""

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
        at_most=4096,
    )

    def __post_init__(self) -> None:
        """Also check that the sizes fit together."""
        super().__post_init__()
        if self.exact_micro_size is not None:
            self._check_exact(self.exact_micro_size)
            self.micro_size = self.exact_micro_size
        if self.micro_size is None and self.global_size is None:
            self.refuse("micro_size", "and batch.global_size=null leave it open; set one of them")

    def _check_exact(self, exact: int) -> None:
        """Check that all micro-batches can have this size, and that it divides the global size."""
        total = self.global_size
        if total is None:
            self.refuse("exact_micro_size", "needs a batch.global_size, which is null; set it")
        elif total % exact:
            fits = next(size for size in range(min(exact, total), 0, -1) if total % size == 0)
            remedies = (
                [f"batch.global_size={exact * round(total / exact)}"] if exact < total else []
            )
            if fits > 1 or not remedies:  # 1 would be slow
                remedies.append(f"batch.exact_micro_size={fits}")
            rule = f"must divide batch.global_size={total}; set {' or '.join(remedies)}"
            self.refuse("exact_micro_size", rule)
        if self.micro_size not in (None, exact):
            rule = f"and batch.micro_size={self.micro_size} are two sizes; set one to null"
            self.refuse("exact_micro_size", rule)
