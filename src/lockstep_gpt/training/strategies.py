"""Lightning's strategies as `configs/strategy/` sets them."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

HOOKS = {
    "none": None,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,  # Vogels et al. 2019
}


def auto(*, accelerator: str, world_size: int, **settings: Any) -> Strategy:
    """Return no wrapper for one rank, `ddp` for more."""
    if world_size == 1:
        device = torch.device("cuda", 0) if accelerator == "cuda" else torch.device("cpu")
        return SingleDeviceStrategy(device)
    return ddp(**settings)


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's, with the hook on CPUs too, without what costs time or waits for the dead."""

    def _setup_model(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Broadcast buffers in each step only if there is state among them, as of BatchNorm."""
        wrapped = super()._setup_model(model)
        if model.state_dict().keys().isdisjoint(name for name, _ in model.named_buffers()):
            wrapped.broadcast_buffers = False  # as an argument it has two names
        return wrapped

    def _register_ddp_hooks(self) -> None:
        """Register the hook that compresses gradients, which Lightning does on GPUs alone."""
        if self._ddp_comm_hook:
            wrapped: Any = self.model
            wrapped.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        """Leave all where it is: a copy to the host waits for a kernel that waits for a peer."""
        self.teardown = lambda: None  # type: ignore[method-assign]


def ddp(
    *,
    process_group_backend: str | None,
    timeout_seconds: float,
    comm_hook: str,
    start_method: str = "agent",  # noqa: ARG001 (read before there are ranks)
    **arguments: Any,
) -> DDPStrategy:
    """Return Lightning's `DDPStrategy`; configs/strategy/ddp.yaml explains the settings.

    What is not named here is passed on to torch's `DistributedDataParallel`.
    """
    state = powerSGD_hook.PowerSGDState(process_group=None) if comm_hook == "powersgd" else None
    return DDPStrategy(
        process_group_backend=process_group_backend,
        timeout=timedelta(seconds=timeout_seconds),
        ddp_comm_hook=HOOKS[comm_hook],
        ddp_comm_state=state,
        **arguments,
    )
