import json

import lightning
import pytest
import torch

from lockstep_gpt.batch import Batch
from lockstep_gpt.tokens.data_settings import DataModuleConfig
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.tokenizer import ByteTokenizer, NumberTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.training.batches import build_data, tokenizer_of

NAME = f"{__name__}.Counting"
BATCH = Batch(micro_size=8).spread_over(devices=4, nodes=2)
MODULE = '''
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset


class Counting(lightning.LightningDataModule):
    """Rows that count from a random digit; says which rows each rank gets."""

    vocab_size = 10

    def __init__(self, rows: int, block_size: int, micro_size: int) -> None:
        super().__init__()
        self.rows, self.block_size, self.micro_size = rows, block_size, micro_size

    def made(self, rows: int, seed: int):
        source = torch.Generator().manual_seed(seed)
        first = torch.randint(10, (rows, 1), generator=source)
        ids = (first + torch.arange(self.block_size + 1)) % 10
        return TensorDataset(ids[:, :-1], ids[:, 1:])

    def train_dataloader(self):
        return DataLoader(self.made(self.rows, 0), self.micro_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.made(32, 1), self.micro_size)

    def test_dataloader(self):
        return DataLoader(self.made(32, 2), self.micro_size)
'''


class Counting(lightning.LightningDataModule):
    def __init__(self, rows, block_size=None, seed=0):
        super().__init__()
        self.given = (rows, block_size, seed)
        self.vocab_size = 10


def own(config, target=NAME, **arguments):
    config.data = DataModuleConfig(_target_=target, arguments=arguments)
    return config


def test_a_data_module_gets_its_arguments_and_the_sizes_that_it_accepts(composed):
    config = own(composed("experiment=smoke", "seed=7"), rows=5)
    module = build_data(config, BATCH)
    assert type(module).__name__ == "Counting"
    assert module.given == (5, config.model.block_size, 7)


class Rooted(lightning.LightningDataModule):
    def __init__(self, root="nowhere", batch=None):
        super().__init__()
        self.given = (root, batch)


def test_an_argument_may_have_the_name_of_a_setting_of_our_sources(composed):
    values = {"_target_": f"{__name__}.Rooted", "root": "here", "val_tokens": 9}
    config = composed("experiment=smoke")
    config.data = DataModuleConfig(**DataModuleConfig.values_of(values))
    module = build_data(config, BATCH)  # without `val_tokens`, which an experiment has set for text
    assert module.given == ("here", BATCH)
    assert config.data.as_values() == {**values, "fingerprint": None}


def test_an_argument_of_the_user_s_comes_before_ours(composed):
    module = build_data(own(composed("experiment=smoke"), rows=5, block_size=3), BATCH)
    assert module.given[1] == 3


@pytest.mark.parametrize(
    ("target", "arguments", "line"),
    [
        (NAME, {"columns": 5}, "has no argument columns; use rows or block_size or seed"),
        (NAME, {}, "missing 1 required positional argument: 'rows'"),
        ("collections.Counter", {}, "is a Counter; name a source in this package, or a Lightning"),
        ("nowhere.Data", {}, "nowhere"),
    ],
)
def test_what_is_no_data_module_is_one_clear_line(composed, target, arguments, line):
    with pytest.raises(UserError, match=line) as caught:
        build_data(own(composed("experiment=smoke"), target, **arguments), BATCH)
    assert "\n" not in str(caught.value)


def test_the_tokenizer_is_the_module_s_or_one_of_numbers():
    module = Counting(1)
    assert tokenizer_of(module).to_dict() == NumberTokenizer(10).to_dict()
    module.tokenizer = ByteTokenizer()
    assert tokenizer_of(module) is module.tokenizer
    del module.tokenizer, module.vocab_size
    with pytest.raises(UserError, match="neither a tokenizer nor a vocab_size; give it one"):
        tokenizer_of(module)


def test_prepared_tokens_come_from_our_own_module(composed, data_root):
    from lockstep_gpt.tokens.prepare import prepare
    from lockstep_gpt.tokens.shards import load_index

    config = composed("experiment=smoke", f"data.root={data_root}")
    config.data.fingerprint = load_index(prepare(config.data)).fingerprint
    module = build_data(config, BATCH)
    assert isinstance(module, TokenDataModule)
    assert (module.micro_size, module.seed) == (BATCH.micro_size, config.seed)


@pytest.fixture
def counting(command):
    """A user's folder with a data module, and its configuration."""
    (command.folder / "counting.py").write_text(MODULE, encoding="utf-8")
    (command.folder / "conf/data").mkdir(parents=True)
    file = command.folder / "conf/data/counting.yaml"
    file.write_text("_target_: counting.Counting\nrows: 64\n", encoding="utf-8")
    return command


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_on_a_user_s_data_module_trains_validates_tests_and_resumes(counting, devices):
    words = ["train", "--config-dir", "conf", "experiment=smoke", "data=counting", "logger=none"]
    words += ["trainer=cpu", f"trainer.devices={devices}", "data.rows=128"]
    result = counting(*words, "run_dir=runs/own", PYTHONPATH=str(counting.folder))
    assert "counting.Counting, a data module of your own\n" in result.stdout
    assert "returns a DataLoader, not a train_loader: the order of samples, rest" in result.stdout
    summary = counting.summary("runs/own")
    assert summary["status"] == "done"
    assert summary["val_loss"] < 2.1  # of ln 10 = 2.3
    tested = ("evaluate", "runs/own", "--split", "test", "--json")
    result = json.loads(counting(*tested, PYTHONPATH=str(counting.folder)).stdout)
    assert result["test/loss"] == pytest.approx(summary["val_loss"], abs=0.1)
    again = ("train", "run_dir=runs/own", "resume=auto", "max_steps=30")
    counting(*again, PYTHONPATH=str(counting.folder))
    summary = counting.summary("runs/own")
    assert (summary["step"], summary["tokens"]) == (30, 30 * 8 * 32)


@pytest.mark.slow
def test_each_rank_has_other_rows_of_a_user_s_loader(counting):
    """As in any Lightning project, a DataLoader is split among the ranks."""
    script = counting.folder / "callback.py"
    script.write_text(
        "import json, lightning, pathlib\n"
        "class Rows(lightning.Callback):\n"
        "    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):\n"
        "        with pathlib.Path(f'rows-{trainer.global_rank}').open('a') as file:\n"
        "            file.write(json.dumps(batch[0][:, 0].tolist()) + '\\n')\n"
    )
    words = ["train", "--config-dir", "conf", "experiment=smoke", "data=counting", "logger=none"]
    words += ["trainer=cpu", "trainer.devices=2", "run_dir=runs/own", "max_steps=8"]
    words += ["+callbacks.rows._target_=callback.Rows", "optim.warmup_steps=1"]
    counting(*words, PYTHONPATH=str(counting.folder))
    source = torch.Generator().manual_seed(0)
    firsts = torch.randint(10, (64, 1), generator=source)[:, 0].tolist()
    rows = []
    for rank in range(2):
        lines = (counting.folder / f"rows-{rank}").read_text().splitlines()
        rows += [first for line in lines for first in json.loads(line)]
    assert sorted(rows) == sorted(firsts)  # all rows of the one epoch, each once
