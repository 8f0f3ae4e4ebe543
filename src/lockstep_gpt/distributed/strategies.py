"""Lightning's strategies as configured in `configs/strategy/`."""

from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn

from lockstep_gpt.registry import merged, resolved


def auto(*, accelerator: str, world_size: int, **settings: Any) -> Strategy:
    """Return a single-device strategy for one rank, `ddp` for more."""
    if world_size == 1:
        device = torch.device("cpu") if accelerator == "cpu" else torch.device(accelerator, 0)
        return SingleDeviceStrategy(device)
    return ddp(**settings)


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's, without slow broadcasts or waiting for dead ranks."""

    def _setup_model(self, model: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Broadcast buffers in each step only if some are saved state, like BatchNorm's."""
        wrapped = super()._setup_model(model)
        if model.state_dict().keys().isdisjoint(name for name, _ in model.named_buffers()):
            wrapped.broadcast_buffers = False  # the argument has two names, by torch version
        return wrapped

    def on_exception(self, exception: BaseException) -> None:  # noqa: ARG002
        """Skip teardown: its copy to the host waits for a kernel that waits for a peer."""
        self.teardown = lambda: None  # type: ignore[method-assign]


def ddp(
    *,
    process_group_backend: str | None,
    timeout_seconds: float,
    comm_hook: str,
    start_method: str = "agent",  # noqa: ARG001 (read before ranks start)
    **arguments: Any,
) -> strategies.DDPStrategy:
    """Return Lightning's `DDPStrategy`; configs/strategy/ddp.yaml explains the settings.

    Other arguments go to torch's `DistributedDataParallel`.
    """
    made = DDPStrategy if comm_hook == "none" else resolved(merged("COMM_HOOKS")[comm_hook])
    return made(
        process_group_backend=process_group_backend,
        timeout=timedelta(seconds=timeout_seconds),
        **arguments,
    )
