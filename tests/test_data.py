"""The batches: windows of a tiny text, their order, and each validation window once."""

from itertools import islice

import pytest
import torch
from lightning import Trainer
from lockstep.functional import IGNORE
from lockstep.tokens import Text, read_windows

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's hints
Tokens = pytest.importorskip("lockstep_gpt.data", reason="your own data").Tokens
T, B = 8, 4
TEXT = "".join(chr(32 + i * i % 90) for i in range(1000))


@pytest.fixture
def new_data(tmp_path):
    """Return a function that makes the data module of `TEXT`, a fifth of which validates."""
    (tmp_path / "text").write_text(TEXT)
    source = Text(path=str(tmp_path / "text"), val_fraction=0.2)

    def make(seed=1):
        data = Tokens(source, block_size=T, batch=B, seed=seed, root=str(tmp_path / "data"))
        data.trainer = Trainer(accelerator="cpu", devices=1, max_steps=50, logger=False)
        return data

    return make


def trained_on(data, count=3):
    """Return the tokens of the first batches."""
    stored = islice(data.train_dataloader(), count)
    return torch.cat([data.on_after_batch_transfer(each, 0)[0] for each in stored])


def test_windows_follow_each_other_in_the_text(new_data):
    data = new_data()
    tokens, targets = read_windows(data.windows["train"], [0, 1])
    text = torch.tensor(list(TEXT.encode()))
    assert tokens.tolist() == text[: 2 * T].view(2, T).tolist()
    assert targets.tolist() == text[1 : 2 * T + 1].view(2, T).tolist()


def test_the_seed_decides_the_order(new_data):
    first = trained_on(new_data(1))
    assert first.shape == (3 * B, T)
    assert torch.equal(first, trained_on(new_data(1)))
    assert not torch.equal(first, trained_on(new_data(2)))


def test_an_epoch_has_each_training_window_once(new_data):
    data = new_data()
    (count,) = data.windows["train"].counts.values()
    positions = torch.arange(count).numpy()
    assert sorted(data.order(positions)) == list(range(count))


def test_validation_has_each_window_once(new_data):
    data = new_data()
    (count,) = data.windows["val"].counts.values()
    targets = [data.on_after_batch_transfer(batch, 0)[1] for batch in data.val_dataloader()]
    rows = [row.tolist() for row in torch.cat(targets) if (row != IGNORE).all()]
    assert rows == read_windows(data.windows["val"], range(count))[1].tolist()
