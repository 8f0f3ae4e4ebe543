"""Rung 2: the same loop on several ranks, with nothing but `torch.distributed`.

torchrun --nproc_per_node=2 lab/ladder/ddp_by_hand.py [flags] [settings]
python lab/ladder/ddp_by_hand.py --spawn 2 [flags] [settings]
RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python lab/ladder/ddp_by_hand.py --init-method tcp://127.0.0.1:29511
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket

import torch
import torch.distributed as dist
from experiment import (
    Experiment,
    Record,
    as_it_is,
    load,
    main,
    micro_batches,
    parser,
    totals,
)
from lockstep.errors import UserError
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def ddp_by_hand() -> None:
    """Read the command line, then run as a rank or start the ranks."""
    flags = parser(__doc__)
    flags.add_argument("--init-method", default="env://", help="where ranks meet: env:// or tcp://")
    flags.add_argument("--spawn", type=int, metavar="N", help="start N ranks from this process")
    options, words = flags.parse_known_args()
    if options.spawn:
        with socket.create_server(("127.0.0.1", 0)) as free:
            options.init_method = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        torch.multiprocessing.spawn(spawned, (options, words), options.spawn)
    else:
        be_rank(options, words)


def spawned(rank: int, options: argparse.Namespace, words: list[str]) -> None:
    """Set the variables that torchrun would set, then run as a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.spawn}
    os.environ.update({name: str(value) for name, value in place.items()})
    be_rank(options, words)


def be_rank(options: argparse.Namespace, words: list[str]) -> None:
    """Join the other ranks, train, and leave the group even after an error."""
    if options.init_method != "env://" and "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        raise UserError(
            f"--init-method={options.init_method}: torchrun's ranks meet at its own store, and "
            "nobody listens at another address; remove it"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    experiment = load(words, world_size)
    device = torch.device(experiment.device_type)
    if device.type == "cuda":  # before NCCL starts: otherwise, every rank would use GPU 0
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=options.init_method,
        rank=rank,
        world_size=world_size,
    )
    try:
        train(experiment, options, device)
    finally:
        dist.destroy_process_group()


def train(experiment: Experiment, options: argparse.Namespace, device: torch.device) -> None:
    """Train, save, and validate as one rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config, accumulation = experiment.config, experiment.batch.accumulation
    torch.manual_seed(config.seed)
    model = experiment.new_model().to(device, experiment.dtype)
    optimizer = experiment.new_optimizer(model)
    scheduler = LambdaLR(optimizer, experiment.schedule.factor)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = 0
    if options.checkpoint and options.checkpoint.exists():
        # Rank 0 saved it from its device; each rank loads it to its own.
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        done = scheduler.last_epoch
    replica = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )

    dataset = experiment.training_set()
    sampler = experiment.sampler(len(dataset), rank, world_size)
    size = experiment.batch.micro_size
    loader = DataLoader(dataset, size, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    batches = micro_batches(loader, sampler, done * accumulation)  # calls `set_epoch`
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=experiment.mixed)
    record = Record(experiment, options.metrics) if rank == 0 else None
    for step in range(done + 1, (options.until or experiment.schedule.steps) + 1):
        mean = torch.zeros((), dtype=experiment.dtype, device=device)
        for micro_step in range(accumulation):
            tokens, targets = next(batches)
            last = micro_step == accumulation - 1  # gradients are exchanged only then
            with contextlib.nullcontext() if last else replica.no_sync():
                with autocast:
                    loss = replica(tokens.to(device), targets.to(device)) / accumulation
                loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or torch.inf)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)  # each rank knows the loss of its own samples only
        if record:
            record.add(step, float(mean) / world_size)

    if options.checkpoint and rank == 0:
        # The model inside the wrapper; the wrapper's names would all begin with `module.`
        torch.save({name: part.state_dict() for name, part in parts.items()}, options.checkpoint)
    model.eval()
    with torch.no_grad(), autocast:
        losses = [
            (model(tokens.to(device), targets.to(device)), len(tokens))
            for tokens, targets in experiment.validation_set().batches(size, rank, world_size)
        ]
    sums = totals(losses).to(device)
    dist.all_reduce(sums)  # sums and counts, not means: ranks have different numbers of samples
    loss_sum, samples, means, count = sums.tolist()
    if record:
        record.close(loss_sum / samples, means / count)


if __name__ == "__main__":
    main(ddp_by_hand)
