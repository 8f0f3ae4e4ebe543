"""Compare BatchNorm over ranks with that of the joined batch; torchrun starts this."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from clock import show
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

SAMPLES = 8  # of a rank


def main() -> None:
    """Fail if an output or a statistic differs."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    torch.manual_seed(0)
    joined = torch.randn(SAMPLES * dist.get_world_size(), 3, device=device) * 5 + 2
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    model = TorchSyncBatchNorm().apply(plain).to(device)
    reference = torch.nn.BatchNorm1d(3).to(device)
    share = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
    torch.testing.assert_close(model(joined[share]), reference(joined)[share])
    torch.testing.assert_close(model[0].running_mean, reference.running_mean)
    torch.testing.assert_close(model[0].running_var, reference.running_var)
    if rank == 0:
        show("forward", f"equal to that of the joined batch, {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
