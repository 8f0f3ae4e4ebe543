"""Clips gradients, and skips updates whose gradients are not finite."""

from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lockstep.callbacks.step import StepCallback
from lockstep.errors import RunError
from lockstep.patches.torch import let_others_unscale
from lockstep.settings import check, check_number, check_whole
from lockstep.strategies.gradient_norms import on_same_mesh
from lockstep.strategies.placing import ModelLayout, layout_of


class ClipAndSkip(StepCallback):
    """Clips the norm of all gradients, and skips an update that would break the weights.

    It works with every optimizer: a skipped step finds no gradients, so weights and moments stay.
    Gradients are sums over ranks by then, so all ranks decide the same. In 16-mixed, the loss
    scaler itself skips updates, and halves its scale, until none overflows. Such updates count only
    at a scale of 1 or less: the gradient itself is at fault.

    After an update, it frees the gradients, so that no forward pass needs memory for them:
    Lightning keeps them until the next backward. List it after callbacks that change or read them.

        >>> trainer = Trainer(callbacks=[lockstep.ClipAndSkip(max_norm=1.0, max_skipped=3)])

    Args:
        max_norm: of all gradients together; None: they are only measured.
        max_skipped: how many updates of the whole run may be skipped, before a `RunError` ends it.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(self, max_norm: float | None = None, max_skipped: int = 0) -> None:
        if max_norm is not None:
            check_number("clip_norm", max_norm, above=0)
        check_whole("max_skipped", max_skipped, at_least=0)
        self.max_norm = max_norm
        self.max_skipped = max_skipped
        self.norm: Tensor | None = None  # of the last update, before clipping, on its device
        self.skipped = torch.zeros((), dtype=torch.int64)  # in the run so far, on the same device
        self._weights: dict[Optimizer, list[nn.Parameter]] = {}
        self._flagged: list[Any] = []  # optimizers that have been told to skip, or not to

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer that clips, too."""
        super().setup(trainer, pl_module, stage)
        value = trainer.gradient_clip_val
        fits = value is None or self.max_norm is None
        rule = "is a second limit next to clip_norm; set one of them to null"
        check("trainer.gradient_clip_val", value, fits, rule)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the weights of each optimizer, in the order of the module."""
        super().on_train_start(trainer, pl_module)
        self.skipped = self.skipped.to(pl_module.device)
        trained = [weight for weight in pl_module.parameters() if weight.requires_grad]
        self._weights = {}
        for optimizer in trainer.optimizers:
            own = {weight for group in optimizer.param_groups for weight in group["params"]}
            self._weights[optimizer] = [weight for weight in trained if weight in own]
            let_others_unscale(optimizer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Measure and clip the gradients; decide whether to skip the update."""
        weights = self._weights[optimizer]
        layout: ModelLayout = layout_of(trainer.strategy)
        self.norm = layout.gradient_norm(weights)
        if self.max_norm is not None:
            for same in on_same_mesh(weights):
                clip_grads_with_norm_(same, self.max_norm, self.norm)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None:
            self._skip_unless_finite(optimizer, self.norm)
        elif not self.norm.isfinite() and scaler.get_scale() <= 1:
            self.skipped += 1  # the scaler skips it

    def _skip_unless_finite(self, optimizer: Optimizer, norm: Tensor) -> None:
        if is_asynchronous(norm.device) and reads_found_inf(optimizer):
            # The host doesn't wait for the device. Beyond the allowed number, all updates are
            # skipped: the weights stay until the host reads that number, and ends the run.
            skip = ~norm.isfinite() | (self.skipped > self.max_skipped)
            self.skipped += skip
            flagged: Any = optimizer
            flagged.found_inf = skip.float()
            self._flagged.append(optimizer)
        elif not norm.isfinite():
            self.skipped += 1
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.grad = None

    def on_step_end(self, trainer: Trainer, pl_module: Any, step: int) -> None:
        """Free the gradients; end the run if the host knows of too many skipped updates.

        DDP's buckets stay, where gradients may be.
        """
        is_known = not self._flagged
        for optimizer in self._flagged:
            optimizer.found_inf = None
        self._flagged = []
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        if is_known:
            self.refuse_broken(step)

    def in_row(self, step: int) -> dict[str, float]:
        """Return the columns of the log: those of the last update, and of the run."""
        if self.norm is None:
            return {}
        return {"optim/grad_norm": float(self.norm), "optim/skipped": float(self.skipped)}

    def after_row(self, step: int) -> None:
        """End the run if it has skipped too many updates."""
        self.refuse_broken(step)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Save no state of a run that is about to end for its gradients."""
        self.refuse_broken(trainer.global_step)

    def refuse_broken(self, step: int) -> None:
        """Raise a `RunError` if more updates than allowed were skipped up to `step`."""
        excess = int(self.skipped) - self.max_skipped
        if excess > 0:
            first = step - excess + 1  # all from this one on were skipped
            raise RunError(
                f"step {first}: the gradient is not finite, and max_skipped="
                f"{self.max_skipped}; the weights are those of step {first - 1}; lower the "
                "learning rate, or allow more"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped updates."""
        return {"skipped": int(self.skipped)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        if not self.trains:
            return
        self.skipped.fill_(state_dict["skipped"])


def is_asynchronous(device: torch.device) -> bool:
    """Return whether the host would wait for the device to read a number."""
    return device.type == "cuda"


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's kernels skip an update where its `found_inf` is not 0.

    Those of torch do so if they are fused, and so does `Muon`.
    """
    if hasattr(type(optimizer), "found_inf"):
        return True
    return all(group.get("fused") for group in optimizer.param_groups)
