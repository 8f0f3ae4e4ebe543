import pickle
import time
from contextlib import closing
from itertools import islice
from types import SimpleNamespace

import lightning
import numpy as np
import pytest
import torch

from lockstep_gpt.config import UserError
from lockstep_gpt.data.datamodule import (
    Feed,
    TokenDataModule,
    TokenStream,
)
from lockstep_gpt.data.order import Order
from lockstep_gpt.data.shards import (
    FORMAT,
    Index,
    SplitWriter,
    open_split,
    write_index,
)
from lockstep_gpt.data.windows import gather, open_windows, widen
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.registry import additions, asked

T, B, SEED = 8, 3, 5
needs_workers = pytest.mark.skipif(not any(additions("DATA_MODULE")), reason="no such extra")
pytestmark = [  # of Lightning, of torch on few cores, and of Python 3.12 on any forked worker
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Random two-byte tokens: 800 for training and 200 for validation."""
    folder, splits = tmp_path_factory.mktemp("data"), {}
    ids = np.random.default_rng(0).integers(1000, size=1000).astype("<u2")
    for name, part in zip(("train", "val"), np.split(ids, [800]), strict=True):
        with closing(SplitWriter(folder, name, "<u2")) as writer:
            writer.append(part)
            splits[name] = writer.saved()
    about = {"vocab_size": 1000}, "f" * 64, {}, {"val_fraction": 0.2}
    write_index(folder, Index(FORMAT, "<u2", *about, splits))
    return folder


class Recorder(lightning.LightningModule):
    """Keeps the batches it gets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated = [], []

    def training_step(self, batch):
        self.trained.append(batch)
        return self.weight.sum()

    def validation_step(self, batch):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def datamodule(folder, num_workers=0, **changes):
    sizes = {"block_size": T, "micro_size": B, "accumulation": 1, "seed": SEED}
    made = asked("DATA_MODULE", SimpleNamespace(source="text", num_workers=num_workers))
    kind = next(filter(None, made), TokenDataModule)
    return kind(folder, **{**sizes, **changes})


def fit(data, max_steps, ckpt_path=None, **options):
    module = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=data.accumulation,
        val_check_interval=2 * data.accumulation,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


def stacked(batches):
    return torch.stack([torch.stack(batch) for batch in batches])


def test_windows_are_whole_and_share_one_token(folder):
    tokens, windows = open_split(folder, "train"), open_windows(folder, "train", T)
    assert windows.shape == ((tokens.size - 1) // T, T + 1) == (99, 9)
    for i in (0, 1, 98):
        np.testing.assert_array_equal(windows[i], tokens[i * T : i * T + T + 1])


def test_targets_are_tokens_one_further(folder):
    windows = open_windows(folder, "train", T)
    ((stored, real),) = gather(windows, [np.array([7, 0])])
    assert (stored.dtype, real) == (torch.uint16, 2)
    tokens, targets = widen((stored, real))
    assert tokens.shape == targets.shape == (2, T)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert tokens.tolist() == windows[[7, 0], :-1].tolist()
    assert targets.tolist() == windows[[7, 0], 1:].tolist()


def test_padding_counts_nowhere(folder):
    tokens, targets = widen(*gather(open_windows(folder, "val", T), [np.array([2, -1])]))
    assert not tokens[1].any()
    assert (targets[1] == IGNORE).all()
    assert (targets[0] >= 0).all()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_follows_the_order(folder, accumulation):
    module, _ = fit(datamodule(folder, accumulation=accumulation), max_steps=5)
    order = Order(SEED, 99, B, rank=0, world_size=1)
    windows = open_windows(folder, "train", T)
    steps = list(islice(order.stream(0), 5 * accumulation))
    expected = [widen(stored) for stored in gather(windows, steps)]
    assert isinstance(module.trained[0], tuple)
    assert torch.equal(stacked(module.trained), stacked(expected))


@needs_workers
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_neither_stream(folder, workers):
    alone, _ = fit(datamodule(folder), max_steps=8)
    helped, _ = fit(datamodule(folder, num_workers=workers), max_steps=8)
    assert torch.equal(stacked(helped.trained), stacked(alone.trained))
    assert torch.equal(stacked(helped.validated), stacked(alone.validated))


def test_a_stream_travels_to_a_worker_without_its_data(folder):
    order = Order(SEED, 99, B, 0, 1, start=4 * B)
    stream = pickle.loads(pickled := pickle.dumps(TokenStream(folder, "train", T, order.stream)))
    assert len(pickled) < 1000
    windows, _ = next(iter(stream))
    assert windows.tolist() == open_windows(folder, "train", T)[next(order.stream(0))].tolist()


@pytest.mark.parametrize(
    ("steps", "accumulation", "workers"),
    [(5, 2, 0), (40, 1, 0), pytest.param(4, 2, 2, marks=needs_workers)],
)
def test_a_resumed_run_sees_the_samples_of_an_uninterrupted_one(
    folder, tmp_path, steps, accumulation, workers
):
    data = {"accumulation": accumulation, "num_workers": workers}
    whole, _ = fit(datamodule(folder, **data), max_steps=steps + 4)
    _, trainer = fit(datamodule(folder, **data), max_steps=steps)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    rest, _ = fit(datamodule(folder, **data), steps + 4, ckpt_path=tmp_path / "run.ckpt")
    expected = stacked(whole.trained)[steps * accumulation :]
    assert torch.equal(stacked(rest.trained), expected)


def test_validation_sees_every_window_once(folder):
    module, _ = fit(datamodule(folder), max_steps=2)
    tokens = torch.cat([tokens for tokens, _ in module.validated])
    targets = torch.cat([targets for _, targets in module.validated])
    real = (targets != IGNORE).all(dim=1)
    expected = open_windows(folder, "val", T).astype(np.int64)
    assert len(tokens) % B == 0
    assert real.sum() == len(expected) == 24
    assert tokens[real].tolist() == expected[:, :-1].tolist()


@pytest.mark.parametrize(("val_tokens", "count"), [(1, 1), (47, 5), (48, 6), (10**6, 24)])
def test_val_tokens_limit_whole_windows_spread_evenly(folder, val_tokens, count):
    data = datamodule(folder, val_tokens=val_tokens)
    assert data.val_windows == count
    module, _ = fit(data, max_steps=2)
    targets = torch.cat([targets for _, targets in module.validated])
    real = targets[(targets != IGNORE).all(dim=1)]
    spread = [number * 24 // count for number in range(count)]
    assert real.tolist() == open_windows(folder, "val", T)[spread, 1:].tolist()


def test_loaders_leave_the_random_state_of_the_run_alone(folder):
    data = datamodule(folder)
    fit(data, max_steps=2)
    before = torch.get_rng_state()
    list(islice(data.train_dataloader(), 2))
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_feed_loads_one_batch_ahead_and_measures_waiting(wait_for):
    made = []

    def slow():
        for number in range(3):
            time.sleep(0.05)
            made.append(number)
            yield number

    feed = Feed(slow(), group=1)
    batches, started = iter(feed), time.perf_counter()
    assert next(batches) == 0
    spent = time.perf_counter() - started
    wait_for(feed.ahead.done)
    assert made == [0, 1]
    started = time.perf_counter()
    assert list(batches) == [1, 2]
    assert 0.09 < feed.waited < spent + time.perf_counter() - started


def test_an_error_in_the_feed_s_thread_stops_the_training():
    with pytest.raises(ZeroDivisionError):
        list(Feed(1 // (1 - number) for number in range(3)))


def test_a_block_longer_than_the_data_is_rejected(folder):
    with pytest.raises(UserError, match=r"val split has 200; set at most 199"):
        datamodule(folder, block_size=200)


def test_the_longest_block_gives_one_window(folder):
    data = datamodule(folder, block_size=199, micro_size=2)
    assert data.val_windows == 1
    module, _ = fit(data, max_steps=2)
    assert (module.validated[0][1][1] == IGNORE).all()
