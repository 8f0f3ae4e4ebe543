import doctest
from contextlib import closing
from itertools import islice

import lightning
import numpy as np
import pytest
import torch
from lockstep_gpt import data as tested
from lockstep_gpt.data import Tokens

from lockstep.checkpoints.callback import Checkpoints
from lockstep.errors import UserError
from lockstep.functional import IGNORE
from lockstep.loading.order import RankOrder, Shuffled
from lockstep.tokens.shards import FORMAT, Index, SplitWriter, open_split, write_index
from lockstep.tokens.sources.pretokenized import RandomTokens
from lockstep.tokens.windows import StreamWindows, read_windows

T, B, SEED = 8, 3, 5
FINGERPRINT = "f" * 64
pytestmark = [  # of Lightning
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]


class Recorder(lightning.LightningModule):
    """Keeps the batches it gets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated, self.tested = [], [], []

    def training_step(self, batch):
        self.trained.append(batch)
        return self.weight.sum()

    def validation_step(self, batch):
        self.validated.append(batch)

    def test_step(self, batch):
        self.tested.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Prepared(RandomTokens):
    """Tokens that are prepared already; each window position is that of `order`, if any."""

    kind = "own"
    make_order = None

    def order(self, *arguments):
        return self.make_order(*arguments) if self.make_order else super().order(*arguments)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Random two-byte tokens: 800 for training, 200 for validation, and 240 for tests."""
    folder, splits = tmp_path_factory.mktemp("data") / f"own-{FINGERPRINT[:8]}", {}
    folder.mkdir()
    ids = np.random.default_rng(0).integers(1000, size=1240).astype("<u2")
    for name, part in zip(("train", "val", "test"), np.split(ids, [800, 1000]), strict=True):
        with closing(SplitWriter(folder, name, "<u2")) as writer:
            writer.append(part)
            splits[name] = writer.saved()
    about = {"kind": "numbers", "vocab_size": 1000}, FINGERPRINT, {}, {"val_fraction": 0.2}
    write_index(folder, Index(FORMAT, "<u2", *about, splits))
    return folder


def datamodule(folder, **changes):
    sizes = {"block_size": T, "batch": B, "seed": SEED}
    place = {"root": str(folder.parent), "fingerprint": FINGERPRINT}
    return Tokens(Prepared(), **{**place, **sizes, **changes})


def order(**places):
    """Return the order of the only rank."""
    return RankOrder(Shuffled(99, SEED), B, rank=0, world_size=1, **places)


def fit(data, max_steps, ckpt_path=None, accumulation=1, **options):
    module = Recorder()
    options.setdefault("enable_checkpointing", "callbacks" in options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulation,
        val_check_interval=2 * accumulation,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


def stacked(batches):
    return torch.stack([torch.stack(batch) for batch in batches])


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch, texts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("\n".join(path.read_text() for path in texts.iterdir()))
    result = doctest.testmod(tested)
    assert result.attempted > 0
    assert result.failed == 0


def test_windows_are_whole_and_share_one_token(folder):
    tokens, windows = open_split(folder, "train"), StreamWindows(folder, "train", T)
    assert windows.counts == {"": (tokens.size - 1) // T} == {"": 99}
    assert not windows.has_padding
    for i in (0, 1, 98):
        np.testing.assert_array_equal(windows[[i]], [tokens[i * T : i * T + T + 1]])


def test_targets_are_tokens_one_further(folder):
    windows = StreamWindows(folder, "train", T)
    stored = windows.collate(windows.__getitems__([7, 0]))
    assert (stored.ids.dtype, stored.real) == (torch.uint16, 2)
    tokens, targets = windows.widen(stored)
    assert tokens.shape == targets.shape == (2, T)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous()
    assert targets.is_contiguous()
    assert tokens.tolist() == windows[[7, 0]][:, :-1].tolist()
    assert targets.tolist() == windows[[7, 0]][:, 1:].tolist()


def test_padding_counts_nowhere(folder):
    windows = StreamWindows(folder, "val", T)
    stored = windows.pad(windows.collate(windows.__getitems__([2, 0])), 1)
    tokens, targets = windows.widen(stored)
    assert not tokens[1].any()
    assert (targets[1] == IGNORE).all()
    assert (targets[0] >= 0).all()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_follows_the_order(folder, accumulation):
    module, _ = fit(datamodule(folder), max_steps=5, accumulation=accumulation)
    windows = StreamWindows(folder, "train", T)
    steps = islice(order(), 5 * accumulation)
    expected = [read_windows(windows, places.samples) for places in steps]
    assert isinstance(module.trained[0], tuple)
    assert torch.equal(stacked(module.trained), stacked(expected))


def test_any_micro_batch_of_training_can_be_read_again(folder):
    data = datamodule(folder)
    module, trainer = fit(data, max_steps=5, accumulation=3)

    def again(step, number):
        return data.windows["train"].widen(trainer.train_dataloader.read_again(step, number))

    batches = [again(place // 3, place % 3) for place in range(15)]
    assert torch.equal(stacked(batches), stacked(module.trained))
    trainer.train_dataloader.load_state_dict({"step": 2, "samples": 13})  # of another size
    places = [*islice(order(accumulation=3, start=13), 6)][3]
    third = read_windows(StreamWindows(folder, "train", T), places.samples)
    assert torch.equal(stacked([again(3, 0)]), stacked([third]))


@pytest.mark.parametrize(("steps", "accumulation"), [(5, 2), (40, 1), (4, 2)])
def test_a_resumed_run_sees_the_samples_of_an_uninterrupted_one(
    folder, tmp_path, steps, accumulation
):
    settings = {"accumulation": accumulation}
    uninterrupted, _ = fit(datamodule(folder), steps + 4, **settings)
    _, trainer = fit(datamodule(folder), steps, **settings)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    rest, _ = fit(datamodule(folder), steps + 4, tmp_path / "run.ckpt", **settings)
    expected = stacked(uninterrupted.trained)[steps * accumulation :]
    assert torch.equal(stacked(rest.trained), expected)


def test_validation_sees_every_window_once(folder):
    module, _ = fit(datamodule(folder), max_steps=2)
    tokens = torch.cat([tokens for tokens, _ in module.validated])
    targets = torch.cat([targets for _, targets in module.validated])
    real = (targets != IGNORE).all(dim=1)
    expected = StreamWindows(folder, "val", T)[np.arange(24)].astype(np.int64)
    assert len(tokens) % B == 0
    assert real.sum() == len(expected) == 24
    assert tokens[real].tolist() == expected[:, :-1].tolist()


@pytest.mark.parametrize(("val_tokens", "count"), [(1, 1), (47, 5), (48, 6), (10**6, 24)])
def test_val_tokens_limit_whole_windows_spread_evenly(folder, val_tokens, count):
    data = datamodule(folder, val_tokens=val_tokens)
    assert sum(data.validated.values()) == count
    module, _ = fit(data, max_steps=2)
    targets = torch.cat([targets for _, targets in module.validated])
    real = targets[(targets != IGNORE).all(dim=1)]
    spread = [number * 24 // count for number in range(count)]
    assert real.tolist() == StreamWindows(folder, "val", T)[spread][:, 1:].tolist()


@pytest.mark.parametrize("val_tokens", [None, 16])
def test_a_test_sees_every_test_window_once(folder, val_tokens):
    data = datamodule(folder, val_tokens=val_tokens)
    module, trainer = fit(data, max_steps=1)
    trainer.test(module, data, verbose=False)
    tokens = torch.cat([tokens for tokens, _ in module.tested])
    targets = torch.cat([targets for _, targets in module.tested])
    real = (targets != IGNORE).all(dim=1)
    expected = StreamWindows(folder, "test", T)[np.arange(29)].astype(np.int64)
    assert real.sum() == len(expected)
    assert tokens[real].tolist() == expected[:, :-1].tolist()
    assert targets[real].tolist() == expected[:, 1:].tolist()


def test_a_split_that_was_not_prepared_is_rejected_with_a_remedy(folder):
    data = datamodule(folder)
    del data.windows["test"]
    with pytest.raises(UserError, match=r"has no test split; .*data\.source\.test_fraction or"):
        data.test_dataloader()


class Reversed:
    """Packing whose windows are those of a stream, from the last to the first."""

    def __init__(self):
        self.prepared = []

    def prepare(self, folder, block_size):
        self.prepared.append((folder, block_size))

    def open(self, folder, split, block_size):
        windows = StreamWindows(folder, split, block_size)
        read = windows.__getitems__
        last = windows.counts[""] - 1
        windows.__getitems__ = lambda rows: read([last - row for row in rows])
        return windows

    def describe(self, folder, block_size):
        return "backwards"


def test_packing_makes_the_windows_of_all_splits(folder):
    packing = Reversed()
    module, _ = fit(datamodule(folder, packing=packing), max_steps=2)
    assert packing.prepared == [(folder, T)]
    windows = StreamWindows(folder, "train", T)
    for (tokens, _), places in zip(module.trained, islice(order(), 2), strict=True):
        assert tokens.tolist() == windows[98 - places.samples][:, :-1].tolist()


def test_another_order_decides_the_training_windows(folder):
    calls = []

    def in_sequence(counts, samples, block_size, seed):
        calls.append((counts, samples, block_size, seed))
        return lambda positions: positions % 99

    data = datamodule(folder)
    data.source.make_order = in_sequence
    module, _ = fit(data, max_steps=3, accumulation=2)
    assert ({"": 99}, 3 * 2 * B, T, SEED) in calls
    tokens_seen = torch.cat([tokens for tokens, _ in module.trained])
    expected = StreamWindows(folder, "train", T)[np.arange(3 * 2 * B)][:, :-1]
    assert tokens_seen.tolist() == expected.tolist()


def test_the_receipt_names_the_windows_and_their_packing(folder):
    lines = datamodule(folder, packing=Reversed(), val_tokens=47).receipt_lines()
    windows = f"{folder}, 99 windows to train on, 5 to validate on"
    assert lines == {"data": windows, "packing": "backwards"}


def test_training_goes_on_with_the_same_tokens_only(folder, tmp_path):
    _, trainer = fit(datamodule(folder), 2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert saved["Tokens"] == {
        "tokenizer": {"kind": "numbers", "vocab_size": 1000},
        "fingerprint": FINGERPRINT,
    }
    other = datamodule(folder)
    other.prepared.fingerprint = "e" * 64
    with pytest.raises(UserError, match=rf"on other tokens than .*data\.fingerprint={FINGERPRINT}"):
        fit(other, 4, tmp_path / "run.ckpt")
    other.force = True
    fit(other, 4, tmp_path / "run.ckpt")
    saved["Tokens"]["tokenizer"]["vocab_size"] = 999
    torch.save(saved, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="with another tokenizer than that of"):
        fit(other, 4, tmp_path / "other.ckpt")


def test_the_loader_s_state_continues_at_any_accumulation(folder, tmp_path):
    """A step of six samples is two micro-batches of three, or one of six."""
    uninterrupted, _ = fit(datamodule(folder), 9, accumulation=2)
    checkpoints = Checkpoints(tmp_path, every=5, keep_best=0)
    fit(datamodule(folder), 5, accumulation=2, callbacks=[checkpoints])
    again = Checkpoints(tmp_path / "again", keep_best=0)
    path = tmp_path / "step=000005.ckpt"
    rest, trainer = fit(datamodule(folder, batch=2 * B), 9, path, callbacks=[again])
    assert trainer.global_step == 9
    tokens = torch.cat([tokens for tokens, _ in uninterrupted.trained])[5 * 2 * B :]
    assert torch.equal(torch.cat([tokens for tokens, _ in rest.trained]), tokens)


def test_loaders_leave_the_random_state_of_the_run_alone(folder):
    data = datamodule(folder)
    fit(data, max_steps=2)
    before = torch.get_rng_state()
    list(islice(data.train_dataloader(), 2))
    list(data.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_block_longer_than_the_data_is_rejected(folder):
    with pytest.raises(UserError, match=r"val split has 200; set at most 199"):
        datamodule(folder, block_size=200)


def test_the_longest_block_gives_one_window(folder):
    data = datamodule(folder, block_size=199, batch=2)
    assert sum(data.validated.values()) == 1
    module, _ = fit(data, max_steps=2)
    assert (module.validated[0][1][1] == IGNORE).all()
