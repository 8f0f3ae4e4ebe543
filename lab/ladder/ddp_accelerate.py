"""Rung 3: the same with Hugging Face Accelerate, on one device or on several ranks.

python lab/ladder/ddp_accelerate.py [flags] [settings]
accelerate launch --multi_gpu --num_processes 2 lab/ladder/ddp_accelerate.py [flags] [settings]
"""

from __future__ import annotations

import argparse
import itertools
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from experiment import (
    Experiment,
    Record,
    as_it_is,
    load,
    main,
    micro_batches,
    parser,
)
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def ddp_accelerate() -> None:
    """Read the command line and train."""
    options, words = parser(__doc__).parse_known_args()
    experiment = load(words, int(os.environ.get("WORLD_SIZE", "1")))
    accelerator = Accelerator(
        cpu=experiment.device_type == "cpu",
        mixed_precision="bf16" if experiment.mixed else "no",
        gradient_accumulation_steps=experiment.batch.accumulation,
    )
    try:
        train(experiment, options, accelerator)
    finally:
        accelerator.end_training()  # leaves the process group


def train(experiment: Experiment, options: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train, save, and validate as one rank of any number of ranks."""
    config, accumulation = experiment.config, experiment.batch.accumulation
    torch.manual_seed(config.seed)
    model = experiment.new_model().to(accelerator.device, experiment.dtype)
    optimizer = experiment.new_optimizer(model)
    scheduler = LambdaLR(optimizer, experiment.schedule.factor)
    dataset, size = experiment.training_set(), experiment.batch.micro_size
    # The sampler is for one rank: `prepare` deals its batches out to all ranks, one after another.
    sampler = experiment.sampler(len(dataset))
    model, optimizer, loader, val_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(dataset, size, sampler=sampler, drop_last=True, collate_fn=as_it_is),
        DataLoader(experiment.validation_set(), size, collate_fn=as_it_is),
    )
    # Not prepared: Accelerate would advance the schedule once for each rank.
    accelerator.register_for_checkpointing(scheduler)
    if options.checkpoint and options.checkpoint.exists():
        accelerator.load_state(str(options.checkpoint))
    done = scheduler.last_epoch

    batches = micro_batches(loader, sampler, done * accumulation)
    record = Record(experiment, options.metrics) if accelerator.is_main_process else None
    for step in range(done + 1, (options.until or experiment.schedule.steps) + 1):
        mean = torch.zeros((), dtype=experiment.dtype, device=accelerator.device)
        for tokens, targets in itertools.islice(batches, accumulation):
            with accelerator.accumulate(model):
                loss = model(tokens, targets)
                accelerator.backward(loss)  # divides by the number of micro-steps
                if accelerator.sync_gradients:  # the last micro-step
                    accelerator.clip_grad_norm_(model.parameters(), config.clip_norm or torch.inf)
                optimizer.step()  # does nothing in the other micro-steps
                optimizer.zero_grad()
            mean += loss.detach() / accumulation
        scheduler.step()
        mean = accelerator.reduce(mean, reduction="mean")
        if record:
            record.add(step, float(mean))

    if options.checkpoint:
        accelerator.save_state(str(options.checkpoint))  # a folder; rank 0 writes the weights
    model.eval()
    gathered = []
    with torch.no_grad():
        for tokens, targets in val_loader:
            losses = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")
            # One loss per sample: the last batches are filled up with samples used before,
            # and only `gather_for_metrics` knows which.
            gathered.append(accelerator.gather_for_metrics(losses.mean(dim=1)))
    if record:
        record.close(float(torch.cat(gathered).double().mean()))


if __name__ == "__main__":
    main(ddp_accelerate)
