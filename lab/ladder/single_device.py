"""Rung 1: the usual training loop, on one device.

python lab/ladder/single_device.py [flags] [settings]
"""

from __future__ import annotations

import argparse
import itertools

import torch
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
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def single_device() -> None:
    """Read the command line and train."""
    options, words = parser(__doc__).parse_known_args()
    train(load(words, world_size=1), options)


def train(experiment: Experiment, options: argparse.Namespace) -> None:
    """Train, save, and validate."""
    config, accumulation = experiment.config, experiment.batch.accumulation
    device = torch.device(experiment.device_type)
    torch.manual_seed(config.seed)
    model = experiment.new_model().to(device, experiment.dtype)
    optimizer = experiment.new_optimizer(model)
    scheduler = LambdaLR(optimizer, experiment.schedule.factor)
    done = 0
    if options.checkpoint and options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location=device, weights_only=True)
        for part, name in ((model, "model"), (optimizer, "optimizer"), (scheduler, "scheduler")):
            part.load_state_dict(state[name])
        done = scheduler.last_epoch

    dataset = experiment.training_set()
    sampler = experiment.sampler(len(dataset))
    size = experiment.batch.micro_size
    loader = DataLoader(dataset, size, sampler=sampler, drop_last=True, collate_fn=as_it_is)
    batches = micro_batches(loader, sampler, done * accumulation)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=experiment.mixed)
    record = Record(experiment, options.metrics)
    for step in range(done + 1, (options.until or experiment.schedule.steps) + 1):
        mean = torch.zeros((), dtype=experiment.dtype, device=device)
        for tokens, targets in itertools.islice(batches, accumulation):
            with autocast:
                loss = model(tokens.to(device), targets.to(device)) / accumulation
            loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm or torch.inf)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record.add(step, float(mean))

    if options.checkpoint:
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state, options.checkpoint)
    model.eval()
    with torch.no_grad(), autocast:
        losses = [
            (model(tokens.to(device), targets.to(device)), len(tokens))
            for tokens, targets in experiment.validation_set().batches(size)
        ]
    loss_sum, samples, means, count = totals(losses).tolist()
    record.close(loss_sum / samples, means / count)


if __name__ == "__main__":
    main(single_device)
