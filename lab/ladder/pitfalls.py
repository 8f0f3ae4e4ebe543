"""The classic mistakes of parallel training, made on purpose: symptom and cure, measured.

python lab/ladder/pitfalls.py [--only NAME] [settings]

Each one really runs, on two ranks over gloo if it needs two.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import single_device
import torch
import torch.distributed as dist
from experiment import load, main
from lockstep.loading.order import eval_parts
from sampler import EpochSampler
from sums import pairwise
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

Finding = tuple[str, str]  # symptom and cure, each with measured values
Tensors = list[torch.Tensor]
HANG_SECONDS = 2.0  # after which a collective without peers is ended
FEW_STEPS = 10
WAY_OUT = 60.0  # longest time in seconds that rank 1 waits while rank 0 hangs


def no_set_epoch(words: list[str], _folder: Path) -> Finding:
    """A sampler whose `set_epoch` is never called."""
    experiment = load(words, 1)
    size = 1000
    sampler = experiment.sampler(size)
    epochs = [list(sampler), list(sampler)]
    same = int(np.equal(*epochs).sum())
    sampler.set_epoch(1)
    cured = int(np.equal(epochs[0], list(sampler)).sum())
    return (
        f"epoch 2 has {same} of {size} samples in the same place as epoch 1: nothing is shuffled",
        f"sampler.set_epoch(epoch) before each epoch: {cured} of {size}",
    )


def same_data_on_every_rank(words: list[str], _folder: Path) -> Finding:
    """A data loader that does not divide the samples among ranks."""
    experiment = load(words, 2)
    micro = experiment.batch.micro_size

    def distinct(samplers: list[EpochSampler]) -> int:
        return len({row for sampler in samplers for row in list(sampler)[:micro]})

    alone = [experiment.sampler(1000) for _ in range(2)]
    shared = [experiment.sampler(1000, rank, 2) for rank in range(2)]
    return (
        f"{distinct(alone)} different samples in a step of {2 * micro}: two ranks, the work of one",
        f"a sampler that knows rank and world size: {distinct(shared)} of {2 * micro}",
    )


def unscaled_learning_rate(words: list[str], _folder: Path) -> Finding:
    """Four devices make the batch four times as large, but the learning rate stays the same."""
    one = [
        "max_steps=100",
        "batch.global_size=4",
        "batch.reference_size=4",
        "schedule.decay=constant",
    ]
    four = [*one, "max_steps=25", "batch.global_size=16"]
    before = _validation_loss([*words, *one])
    unscaled = _validation_loss([*words, *four, "lr_scaling=none"])
    scaled = _validation_loss([*words, *four, "lr_scaling=sqrt"])
    return (
        f"after the same samples the validation loss is {unscaled:.3f}, on one device {before:.3f}",
        f"scale the rate with the batch (Adam: by its square root): {scaled:.3f}; or keep "
        "batch.global_size, and the loss is the same up to rounding",
    )


def _validation_loss(words: list[str]) -> float:
    """Train with the first rung, without output."""
    with tempfile.NamedTemporaryFile("r", suffix=".csv") as file:
        options = argparse.Namespace(metrics=Path(file.name), checkpoint=None, until=None)
        with contextlib.redirect_stdout(io.StringIO()):
            single_device.train(load(words, 1), options)
        return float(list(csv.DictReader(file))[-1]["val/loss"])


def module_prefixes(_words: list[str], folder: Path) -> Finding:
    """The state of the DDP wrapper is saved instead of the model's."""
    model = nn.Linear(4, 4)
    wrapped = DistributedDataParallel(model)
    fresh = nn.Linear(4, 4)
    torch.save(wrapped.state_dict(), folder / f"{dist.get_rank()}.pt")
    state = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
    loaded = len(state) - len(fresh.load_state_dict(state, strict=False).unexpected_keys)
    cured = fresh.load_state_dict(wrapped.module.state_dict())
    return (
        f"keys like {next(iter(state))!r}: strict loading fails, and strict=False silently loads "
        f"{loaded} of {len(state)} tensors",
        f"save model.module.state_dict(): {len(cured.unexpected_keys)} unexpected keys",
    )


def saving_from_all_ranks(_words: list[str], folder: Path) -> Finding:
    """Every rank writes the same file."""
    path = folder / "model.pt"
    rank = dist.get_rank()
    content = io.BytesIO()
    torch.save(nn.Linear(64, 64).state_dict(), content)
    data = content.getvalue()
    if rank == 0:
        path.write_bytes(data)
    dist.barrier()
    broken = ""
    if rank == 1:  # comes later, opens the file again, and has written half
        file = path.open("wb")
        file.write(data[: len(data) // 2])
        file.flush()
    dist.barrier()
    if rank == 0:
        try:
            torch.load(path, weights_only=True)
        except (OSError, RuntimeError) as error:
            broken = type(error).__name__
    dist.barrier()
    if rank == 1:
        file.close()
    else:
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(data)
        temporary.replace(path)
        torch.load(path, weights_only=True)
    dist.barrier()
    return (
        f"rank 0 reads its file back: {broken}, as rank 1 is writing; a kill leaves it like that",
        "only rank 0 writes a temporary file, and renames it: the file can be loaded at any time",
    )


def collective_on_rank_zero_only(_words: list[str], folder: Path) -> Finding:
    """An all-reduce inside `if rank == 0`."""
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=HANG_SECONDS))
    over = folder / "over"
    started = time.perf_counter()
    ended = "nothing"
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            ended = type(error).__name__
        over.touch()
    seconds = time.perf_counter() - started
    while not over.exists() and time.perf_counter() - started < WAY_OUT:
        time.sleep(0.05)  # rank 1 does something else
    total = torch.ones(1)
    dist.all_reduce(total)
    return (
        f"rank 0 hangs; the group's timeout of {HANG_SECONDS:g} s ended it after {seconds:.1f} s "
        f"({ended}); the default is 30 minutes",
        f"all ranks call it, and only rank 0 prints: the sum is {total.item():g}",
    )


def average_over_padding(_words: list[str], _folder: Path) -> Finding:
    """The sampler pads a validation set that does not divide evenly; batch means are averaged."""
    values = torch.arange(5, dtype=torch.float64)  # the "losses" of five samples
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    sampler = DistributedSampler(range(5), ranks, rank, shuffle=False)  # type: ignore[arg-type]
    mean = values[list(sampler)].mean()
    dist.all_reduce(mean)
    parts = eval_parts(5, 1, rank, ranks, whole=True)
    local_values = values[[part.first for part in parts]]
    sums = torch.stack([local_values.sum(), local_values.new_tensor(len(local_values))])
    dist.all_reduce(sums)
    return (
        f"the mean of 0, 1, 2, 3, 4 on two ranks is {mean / ranks:.3f}: sample 0 counts twice",
        f"add up sums and counts, with each sample once: {sums[0] / sums[1]:.3f}",
    )


def batchnorm_of_tiny_batches(_words: list[str], _folder: Path) -> Finding:
    """BatchNorm sees only the samples of its own rank."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8, dtype=torch.float64)  # over all ranks: two samples each
    local_batch = batch.chunk(2)[dist.get_rank()]

    def gap(norm: nn.Module) -> float:
        joined = norm(batch).chunk(2)[dist.get_rank()]
        largest = (norm(local_batch) - joined).abs().max().detach()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    tiny = gap(nn.BatchNorm1d(8).double())
    layer = gap(nn.LayerNorm(8).double())
    return (
        f"outputs of two samples per rank are up to {tiny:.2f} from those of one batch of four",
        f"SyncBatchNorm (GPUs; trainer.sync_batchnorm=true), or LayerNorm as in GPT: {layer:.2f}",
    )


class _TwoHeads(nn.Module):
    """A model that does not use one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def sums_in_another_order(_words: list[str], _folder: Path) -> Finding:
    """One GPU and two differ in the eighth digit, because they add in different orders."""
    apart, largest, size = _differing(_one_by_one)
    cured, _, _ = _differing(_in_the_tree)
    return (
        f"after {FEW_STEPS} steps of 8 micro-batches in float32, {apart} of {size} weights of one "
        f"rank and two differ, by up to {largest:.0e}: ((0+1)+2)+... is not (0+...+3)+(4+...+7)",
        f"both add pairwise, ((0+1)+(2+3))+((4+5)+(6+7)), as batch.exact_micro_size does: {cured} "
        f"of {size}",
    )


def _one_by_one(leaves: list[Tensors]) -> Tensors:
    """Add in the order in which gradients are accumulated."""
    return [sum(gradients[1:], start=gradients[0]) for gradients in zip(*leaves, strict=True)]


def _in_the_tree(leaves: list[Tensors]) -> Tensors:
    return [pairwise([*parts]) for parts in zip(*leaves, strict=True)]


def _differing(add: Callable[[list[Tensors]], Tensors]) -> tuple[int, float, int]:
    """Return how many weights of one rank and two differ, the largest difference, and the total."""
    alone = _weights(add, 1)
    shared = _weights(add, 2)
    gaps = (alone - shared).abs()
    return int(gaps.count_nonzero()), float(gaps.max()), len(gaps)


def _weights(add: Callable[[list[Tensors]], Tensors], ranks: int) -> torch.Tensor:
    """Train on `ranks` ranks; each uses `add` for the gradients of its part of 8 micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    parameters = [*model.parameters()]
    share = 8 // ranks
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(FEW_STEPS):
        batch = torch.randn(8, 4, 16)  # the same random numbers on all ranks
        first = share * dist.get_rank() if ranks > 1 else 0
        leaves = [
            [*torch.autograd.grad(model(leaf).square().mean() / 8, parameters)]
            for leaf in batch[first : first + share]
        ]
        for parameter, total in zip(parameters, add(leaves), strict=True):
            if ranks > 1:
                dist.all_reduce(total)
            parameter.grad = total
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def unused_parameters(_words: list[str], _folder: Path) -> Finding:
    """A step does not use a layer, but DDP waits for its gradient."""

    def steps(**options: Any) -> tuple[int, str]:
        model = DistributedDataParallel(_TwoHeads(), **options)
        for step in range(3):
            try:
                model(torch.ones(2, 4)).sum().backward()
            except RuntimeError as error:
                return step, f"{type(error).__name__}: {str(error).split('.')[0]}"
        return 3, ""

    done, error = steps()
    cured, _ = steps(find_unused_parameters=True)
    return (
        f"after {done} step of 3: {error}",
        f"find_unused_parameters=True: {cured} steps of 3; better: use every layer",
    )


def rate_that_rises_again(words: list[str], _folder: Path) -> Finding:
    """CosineAnnealingLR runs beyond its `T_max`, as after raising the number of steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    rates = []
    for _ in range(76):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    schedule = load(words, 1).schedule
    ends = [schedule.factor(step) for step in (schedule.steps - 1, schedule.steps + 25)]
    return (
        f"its share of the peak is {rates[50]:.2f} at step 50 = T_max, and {rates[75]:.2f} at 75",
        f"a schedule that stays at its last value: {ends[0]:.2f}, and {ends[1]:.2f} beyond",
    )


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """Hide what torch's C++ code prints about a timeout that is intended."""
    screen = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)


def address_under_a_launcher(_words: list[str], _folder: Path) -> Finding:
    """`init_method="tcp://..."` in a process that torchrun has started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    limit = timedelta(seconds=HANG_SECONDS)
    started = time.perf_counter()
    ended = "nothing"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as set by torchrun
    try:
        with _without_stacks():
            dist.init_process_group("gloo", address, limit, world_size=1, rank=0)
    except RuntimeError as error:
        ended = type(error).__name__
    seconds = time.perf_counter() - started
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    mended = dist.is_initialized()
    if mended:
        dist.destroy_process_group()
    dist.init_process_group("gloo", address, limit, world_size=1, rank=0)
    met = dist.get_world_size()
    dist.destroy_process_group()
    if mended:
        return (
            f"none: torch {torch.__version__} opens a store there, after {seconds:.1f} s; up to "
            "torch 2.13, every rank waits for one that torchrun's agent never opens",
            f"env://, the default, works under every launcher; without one: {met} rank meets",
        )
    return (
        f"every rank waits there for a store that torchrun's agent never opens; a timeout of "
        f"{HANG_SECONDS:g} s ended it after {seconds:.1f} s ({ended}); the default is 30 minutes",
        f"env://, the default, under a launcher; without one, the address works: {met} rank meets",
    )


Pitfall = Callable[[list[str], Path], Finding]
ALONE: tuple[Pitfall, ...] = (
    no_set_epoch,
    same_data_on_every_rank,
    unscaled_learning_rate,
    rate_that_rises_again,
    address_under_a_launcher,
)
ON_TWO_RANKS: tuple[Pitfall, ...] = (
    module_prefixes,
    saving_from_all_ranks,
    collective_on_rank_zero_only,
    average_over_padding,
    batchnorm_of_tiny_batches,
    sums_in_another_order,
    unused_parameters,
)


def be_rank(rank: int, names: list[str], words: list[str], folder: Path) -> None:
    """Run those of `names` that need two ranks, as one of the ranks; rank 0 prints the findings."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for pitfall in ON_TWO_RANKS:
        if pitfall.__name__ in names:
            finding = pitfall(words, folder)
            if rank == 0:
                show(pitfall, finding)
    dist.destroy_process_group()


def show(pitfall: Pitfall, finding: Finding) -> None:
    """Print one pitfall."""
    name = pitfall.__name__.replace("_", " ").lstrip()
    print(
        f"{name}: {pitfall.__doc__}\n  symptom  {finding[0]}\n  cure     {finding[1]}\n", flush=True
    )


def pitfalls() -> None:
    """Run the chosen pitfalls."""
    known = [pitfall.__name__ for pitfall in (*ALONE, *ON_TWO_RANKS)]
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--only", choices=known, help="run this one")
    options, words = flags.parse_known_args()
    words = [*words, "trainer=cpu"]
    load(words, 1)  # rejects wrong settings before any rank starts
    names = [options.only] if options.only else known
    with tempfile.TemporaryDirectory() as name:
        for pitfall in ALONE:
            if pitfall.__name__ in names:
                show(pitfall, pitfall(words, Path(name)))
        if "lo" in {interface for _, interface in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if any(pitfall.__name__ in names for pitfall in ON_TWO_RANKS):
            torch.multiprocessing.spawn(be_rank, (names, words, Path(name)), 2)


if __name__ == "__main__":
    main(pitfalls)
