"""Skips updates whose gradients are not finite, and ends a run with too many of them."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep_gpt.errors import RunError
from lockstep_gpt.torch_patches import mark_overflow


class SkippedUpdates:
    """Counts the updates that were skipped in the whole run, and decides on each new one."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed  # `guard.max_skipped`
        self.count = torch.zeros((), dtype=torch.int64)  # on the module's device

    def skip_unless_finite(self, optimizer: Optimizer, norm: Tensor, scaler: Any) -> None:
        """Decide on the device whether to skip this update; the host doesn't wait for it.

        The gradients are averages over ranks, so all ranks decide the same. Beyond the allowed
        number every update is skipped: the weights stay until `refuse_broken` ends the run.
        In 16-mixed, the loss scaler itself skips updates, and halves its scale, until none
        overflows. Such updates count only at a scale of 1 or less: the gradient itself is at fault.

        Args:
            optimizer: has fused kernels, which skip an update where its `found_inf` is not 0.
            norm: of the gradients of all ranks, before clipping.
            scaler: scales the loss in 16-mixed; None in other precisions.
        """
        fused: Any = optimizer
        if scaler is None:
            skip = ~norm.isfinite() | (self.count > self.allowed)
            self.count += skip
            fused.found_inf = skip.float()
            return
        is_small = scaler.scale(torch.ones_like(norm)) <= 1
        skip = (~norm.isfinite() & is_small) | (self.count > self.allowed)
        self.count += skip
        mark_overflow(scaler, optimizer, skip)
        fused.found_inf = None

    def refuse_broken(self, step: int) -> None:
        """Raise a `RunError` if more updates than allowed were skipped up to `step`."""
        excess = int(self.count) - self.allowed
        if excess > 0:
            first = step - excess + 1  # all from this one on were skipped
            raise RunError(
                f"step {first}: the gradient is not finite, and guard.max_skipped={self.allowed}; "
                f"the weights are those of step {first - 1}; lower optim.lr, or allow more"
            )
