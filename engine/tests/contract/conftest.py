"""A plain Lightning project that the engine was not designed for, on any number of gloo ranks."""

import hashlib
import os
import warnings
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.exact_sums import SingleDeviceStrategy

SAMPLES = 960
STEP = 48  # samples of a step: 1, 2, 3, and 4 ranks share them, with and without accumulation
KINDS = ("dict", "tuple", "tensor")
NOISE = [
    "`isinstance.treespec, LeafSpec.` is deprecated",
    "It is recommended to use `self.log",
    "The dirpath has changed from",
]


class Rows(Dataset):
    """Samples in one of three shapes that the engine has never seen."""

    def __init__(self, kind, first=0, count=SAMPLES):
        random = torch.Generator().manual_seed(0)
        rows = torch.randn(2 * SAMPLES, 8, generator=random)[first : first + count]
        self.kind, self.rows = kind, rows
        self.labels = (rows.sum(1) > 0).long()
        self.weights = rows[:, 0].abs() + 0.5

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if self.kind == "dict":
            return {"x": self.rows[i], "y": self.labels[i]}
        if self.kind == "tuple":
            return self.rows[i], self.labels[i], self.weights[i]
        return self.rows[i]


class Foreign(lightning.LightningModule):
    """Plain Lightning: dropout, its own optimizer, and batches of its own shape."""

    def __init__(self, kind="dict", dropout=0.2, make=torch.optim.Adam, **settings):
        super().__init__()
        self.kind, self.make = kind, lambda weights: make(weights, **{"lr": 1e-2, **settings})
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))

    def loss_of(self, batch):
        if self.kind == "dict":
            return nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        if self.kind == "tuple":
            x, y, weight = batch
            losses = nn.functional.cross_entropy(self.net(x), y, reduction="none")
            return (weight * losses).mean()
        return (self.net(batch) - batch[:, :2]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self):
        return self.make(self.parameters())


class StepOrder(Sampler):
    """Micro-batches whose union in a step is the same 48 samples, on any number of ranks."""

    def __init__(self, rank, world_size, accumulation, start=0):
        self.rank, self.accumulation, self.start = rank, accumulation, start
        self.size = STEP // (world_size * accumulation)

    def __len__(self):
        return 10**6

    def __iter__(self):
        for step in range(self.start, len(self)):
            for micro_batch in range(self.accumulation):
                leaf = self.rank * self.accumulation + micro_batch
                first = step * STEP + leaf * self.size
                yield [7919 * (first + sample) % SAMPLES for sample in range(self.size)]


def make_module(*arguments, of=Foreign, **settings):
    """Return a foreign module with the same initial weights in every process."""
    torch.manual_seed(0)
    return of(*arguments, **settings)


def here():
    """Return this process's rank."""
    return int(os.environ.get("RANK", "0"))


def make_strategy(world_size, exact):
    """Return the engine's strategy for so many ranks."""
    threads = 1 if exact else None
    if world_size == 1:
        return SingleDeviceStrategy(torch.device("cpu"), exact_threads=threads)
    return DDPStrategy(process_group_backend="gloo", exact_threads=threads)


def train(
    module,
    *callbacks,
    world_size=1,
    accumulation=1,
    steps=8,
    start=0,
    exact=False,
    strategy=None,
    ckpt_path=None,
    validate_every=None,
    loaders=None,
    **settings,
):
    """Fit with a plain Trainer; return it.

    Args:
        module: foreign.
        callbacks: those of the engine's parts that take part, and of the test's.
        world_size: of the gloo ranks, of which this process is one.
        accumulation: micro-batches of a rank in a step.
        steps: where training ends.
        start: the step of `ckpt_path`.
        exact: whether gradients are added in one order.
        strategy: None: the engine's.
        ckpt_path: to continue from; or a function of the Trainer that returns it.
        validate_every: micro-batches between validations; None: there is none.
        loaders: for training and validation; None: the same samples in each step.
        settings: others of the Trainer.
    """
    if loaders is None:
        order = StepOrder(here(), world_size, accumulation, start)
        held_out = torch.utils.data.Subset(
            Rows(module.kind, SAMPLES, STEP), range(here(), STEP, world_size)
        )
        loaders = (
            DataLoader(Rows(module.kind), batch_sampler=order),
            DataLoader(held_out, batch_size=4),
        )
    if validate_every is None:
        settings.setdefault("limit_val_batches", 0)
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)  # advice on loaders
        for noise in NOISE:
            warnings.filterwarnings("ignore", noise)
        trainer = lightning.Trainer(
            **{
                "accelerator": "cpu",
                "devices": world_size,
                "strategy": strategy or make_strategy(world_size, exact),
                "callbacks": [*callbacks],
                "max_steps": steps,
                "max_epochs": -1,
                "accumulate_grad_batches": accumulation,
                "val_check_interval": validate_every,
                "check_val_every_n_epoch": None if validate_every else 1,
                "num_sanity_val_steps": 0,
                "use_distributed_sampler": False,
                "logger": False,
                "enable_checkpointing": saves,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                **settings,
            }
        )
        if callable(ckpt_path):
            ckpt_path = ckpt_path(trainer)
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def digest(module):
    """Return the SHA-256 of all weights."""
    sha256 = hashlib.sha256()
    for weight in module.parameters():
        sha256.update(weight.detach().numpy().tobytes())
    return sha256.hexdigest()


def weights_of(module):
    """Return all weights as numbers, which another process can read."""
    return [weight.detach().flatten().tolist() for weight in module.parameters()]


@pytest.fixture(scope="session")
def foreign():
    """The plain project: its module, samples, order, and Trainer."""
    return SimpleNamespace(
        Module=Foreign,
        Rows=Rows,
        StepOrder=StepOrder,
        SAMPLES=SAMPLES,
        STEP=STEP,
        module=make_module,
        strategy=make_strategy,
        train=train,
        digest=digest,
        weights=weights_of,
        rank=here,
    )


@pytest.fixture
def on_each(on_ranks):
    """Call a function on so many ranks, of which one is this process; return what each returns."""

    def run(world_size, function):
        if world_size == 1:
            return [function(0)]
        results = on_ranks(world_size, lambda rank: (function(rank),))
        for result in results:
            assert isinstance(result, tuple), result  # a traceback otherwise
        return [result for (result,) in results]

    return run
