"""The other kind of parallelism: the model's layers split over two ranks, equal to one process.

python lab/ladder/two_stages.py [--steps 5] [--micro-batches 4] [settings]

Rank 0 has the embeddings and the first half of the blocks, rank 1 the rest. First by hand, with
send and receive, where one rank always waits for the other; then with micro-batches through
`torch.distributed.pipelining`, where both ranks work at the same time.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from experiment import Experiment, as_it_is, load, main, micro_batches
from lockstep.errors import UserError
from lockstep.functional import linear_cross_entropy
from lockstep.tokens.windows import Batch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader

from lockstep_gpt.language_model import LanguageModel


class First(nn.Module):
    """The embeddings and the first half of the blocks."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        model.blocks = model.blocks[: len(model.blocks) // 2]
        model.final_norm = nn.Identity()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn tokens, (B, T), into activations, (B, T, C)."""
        return self.model.features(tokens)


class Second(nn.Module):
    """The second half of the blocks, the last norm, and the weights of the head."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.blocks = model.blocks[len(model.blocks) // 2 :]
        self.final_norm = model.final_norm
        self.head = model.token_embedding
        self.vocab_size = model.vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Turn activations into the input of the head, both (B, T, C)."""
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.final_norm(x)
        return features

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return linear_cross_entropy(features, self.head.weight, self.vocab_size, targets)


def whole_model(experiment: Experiment) -> LanguageModel:
    """Initialize the whole model, the same on every rank; each rank then keeps its part."""
    torch.manual_seed(experiment.config.seed)
    return experiment.new_model().double()


def batches(experiment: Experiment, steps: int) -> list[Batch]:
    """Return the first batches of the run."""
    dataset = experiment.training_set()
    sampler = experiment.sampler(len(dataset))
    size = experiment.batch.micro_size
    loader = DataLoader(dataset, size, sampler=sampler, collate_fn=as_it_is)
    stream = micro_batches(loader, sampler, done=0)
    return [next(stream) for _ in range(steps)]


def one_process(experiment: Experiment, steps: int) -> list[float]:
    """Train the whole model; return the loss of each step."""
    model = whole_model(experiment)
    optimizer = experiment.new_optimizer(model)
    losses = []
    for tokens, targets in batches(experiment, steps):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def by_hand(stage: First | Second, batch: Batch, experiment: Experiment) -> Tensor:
    """Run forward and backward of one batch with send and receive; return the loss on rank 1."""
    tokens, targets = batch
    if isinstance(stage, First):
        out = stage(tokens)
        dist.send(out.detach(), dst=1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, src=1)  # rank 0 is idle until then
        out.backward(gradient)
        return out.new_zeros(())
    x = torch.empty(*tokens.shape, experiment.config.model.n_embd, dtype=torch.float64)
    dist.recv(x, src=0)
    loss = stage.loss(stage(x.requires_grad_()), targets)
    loss.backward()
    assert x.grad is not None
    dist.send(x.grad, dst=0)
    return loss.detach()


def pipelined(stage: First | Second, batch: Batch, schedule: ScheduleGPipe) -> Tensor:
    """Do the same in micro-batches: while rank 1 works on one, rank 0 works on the next."""
    tokens, targets = batch
    if isinstance(stage, First):
        schedule.step(tokens)
        return torch.zeros((), dtype=torch.float64)
    losses: list[Tensor] = []
    schedule.step(target=targets, losses=losses)
    return torch.stack(losses).mean().detach()


def be_stage(rank: int, options: argparse.Namespace, words: list[str], folder: Path) -> None:
    """Train as one stage, in both ways; rank 1 saves the losses in `folder`."""
    experiment = load(words, 1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    losses = {}
    for method in ("send and receive", "pipelining"):
        stage = [First, Second][rank](whole_model(experiment))
        step = functools.partial(by_hand, stage, experiment=experiment)
        if method == "pipelining":
            part = PipelineStage(stage, rank, 2, torch.device("cpu"))
            # Only rank 1 calls it. A schedule without one does not expect a backward, and the other
            # rank would wait forever.
            loss = stage.loss if isinstance(stage, Second) else Second.loss
            schedule = ScheduleGPipe(part, options.micro_batches, loss_fn=loss)
            step = functools.partial(pipelined, stage, schedule=schedule)
        optimizer = experiment.new_optimizer(stage)
        losses[method] = []
        for batch in batches(experiment, options.steps):
            losses[method].append(float(step(batch)))
            share_tied_gradient(stage)
            optimizer.step()
            optimizer.zero_grad()
    if rank == 1:
        torch.save(losses, folder / "losses")
    dist.destroy_process_group()


def share_tied_gradient(stage: First | Second) -> None:
    """Add up the gradients of the token embedding, whose weights are also the head on rank 1."""
    shared = stage.model.token_embedding if isinstance(stage, First) else stage.head
    assert shared.weight.grad is not None
    dist.all_reduce(shared.weight.grad)


def two_stages() -> None:
    """Train in all three ways, and print the losses side by side."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--steps", type=int, default=5)
    flags.add_argument("--micro-batches", type=int, default=4)
    options, words = flags.parse_known_args()
    words = [*words, "precision=64-true"]
    experiment = load(words, 1)
    if experiment.batch.micro_size % options.micro_batches or options.steps < 1:
        raise UserError(
            f"--micro-batches {options.micro_batches} must divide the batch of "
            f"{experiment.batch.micro_size} samples, and --steps {options.steps} must be at least 1"
        )
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.spawn(be_stage, (options, words, folder), 2)
        losses_by_method = torch.load(folder / "losses", weights_only=True)
    runs = {"one process": one_process(experiment, options.steps), **losses_by_method}
    print(f"{'step':4}" + "".join(f"{name:>20}" for name in runs))
    for step, losses in enumerate(zip(*runs.values(), strict=True), 1):
        print(f"{step:4}" + "".join(f"{loss:20.12f}" for loss in losses))
    gaps = [
        abs(a - b)
        for run in losses_by_method.values()
        for a, b in zip(run, runs["one process"], strict=True)
    ]
    print(f"largest difference {max(gaps):.1e}")


if __name__ == "__main__":
    main(two_stages)
