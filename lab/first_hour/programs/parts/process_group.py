"""One rank with a process group: NCCL's own code runs, without a peer."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from clock import DRY
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=60)


def join() -> None:
    """Create the process group, once."""
    if dist.is_initialized():
        return
    settings: dict[str, Any] = {"backend": "gloo"}
    if not DRY:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        settings = {"backend": "nccl", "device_id": device}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # any free port
    dist.init_process_group(store=store, rank=0, world_size=1, timeout=TIMEOUT, **settings)


def in_ddp(model: nn.Module, bucket_cap_mb: float) -> DistributedDataParallel:
    """Return a model in DDP, as the project wraps it."""
    return DistributedDataParallel(
        model,
        device_ids=None if DRY else [0],
        gradient_as_bucket_view=True,
        bucket_cap_mb=bucket_cap_mb,  # type: ignore[arg-type] # torch takes fractions, too
    )
