"""A LightningModule and a LightningDataModule that their author wrote without knowledge of us."""

import csv
import json
import subprocess
import sys
import types

import lightning
import pytest
import torch
from lockstep_gpt import train as program

import lockstep

pytestmark = pytest.mark.usefixtures("quick_ranks")

MINE = """
import lightning, os, pathlib, signal, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rows(Dataset):
    def __init__(self, first, count):
        source = torch.Generator().manual_seed(0)
        self.rows = torch.randn(208, 8, generator=source)[first : first + count]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"x": self.rows[i], "y": (self.rows[i].sum() > 0).long()}


class Module(lightning.LightningModule):
    def __init__(self, lr=1e-2, dropout=0.1):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, name="val"):
        logits = self.net(batch["x"])
        self.log(f"{name}/loss", nn.functional.cross_entropy(logits, batch["y"]), sync_dist=True)
        right = (logits.argmax(1) == batch["y"]).float()
        self.log(f"{name}/acc", right.mean(), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Scheduled(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Placed(Module):
    def configure_model(self):
        from lockstep.strategies.placing import place

        place(self.net, self.trainer.strategy)


class Late(Module):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Linear(8, 2)


class OnTokens(Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(256, 256)

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), targets.flatten())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)


class Data(lightning.LightningDataModule):
    def __init__(self, batch, root="nowhere"):
        super().__init__()
        self.size, self.root = batch.micro_size, root

    def train_dataloader(self):  # Lightning's own sampler would shuffle, and differ by rank
        rows, here = Rows(0, 80), self.trainer
        sampler = DistributedSampler(rows, here.world_size, here.global_rank, shuffle=False)
        return DataLoader(rows, self.size, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(Rows(80, 64), self.size)

    def test_dataloader(self):
        return DataLoader(Rows(144, 64), self.size)


class KillOnce(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        note = pathlib.Path("killed-once")
        if trainer.global_step == 14 and trainer.is_global_zero and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
SHORT = ("max_steps=20", "val_every=10", "log_every=10", "batch.global_size=8")
OF_TEXT = (
    "token",
    "perplexity",
    "nats",
    "vocabulary",
    "attention",
    "generate",
    "scaled",
    "products",
)


@pytest.fixture
def train(command):
    """Return a function that trains the author's module in the author's folder."""
    (command.folder / "mine.py").write_text(MINE)
    for group, name in (("module", "Module"), ("data", "Data")):
        (command.folder / "conf" / group).mkdir(parents=True)
        file = command.folder / "conf" / group / "mine.yaml"
        file.write_text(f"_target_: mine.{name}\n")

    def run(*words, status=0):
        choices = ["--config-dir", "conf", "module=mine", "data=mine", "trainer=cpu"]
        loggers = [] if "logger=wandb" in words else ["logger=none"]
        return command("train", *choices, *loggers, *SHORT, *words, status=status)

    run.folder, run.command, run.summary = command.folder, command, command.summary
    return run


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def weights_of(folder):
    (path,) = folder.glob("checkpoints/step=000020.ckpt")
    return torch.load(path, weights_only=True)["state_dict"]


def trained_by_lightning(**settings):
    """Return the weights and metrics of the author's module after 20 steps of plain Lightning."""
    mine = types.ModuleType("mine")
    exec(MINE, mine.__dict__)
    torch.manual_seed(1337)
    module = mine.Module(dropout=0.0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=20,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        inference_mode=False,
        **settings,
    )
    trainer.fit(module, mine.Data(types.SimpleNamespace(micro_size=8)))
    return module.state_dict(), trainer.callback_metrics


NOISE = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*srun"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


def quiet(function):
    for mark in NOISE:
        function = mark(function)
    return function


@quiet
@pytest.mark.slow
def test_one_and_two_ranks_train_it_as_lightning_itself_does(train):
    expected, measured = trained_by_lightning()
    printed = train("module.dropout=0", "run_dir=one").stdout
    train("module.dropout=0", "run_dir=two", "trainer.devices=2", "logger=wandb")
    assert "module     Module, 354 parameters" in printed
    assert "loaders  train_dataloader returns a DataLoader, not a train_loader: the ord" in printed
    assert "val/loss" in printed
    assert [word for word in OF_TEXT if word in printed] == []
    assert "optimizer  Adam begins with lr 0.01, with no scheduler" in printed
    assert "(linear)" not in printed  # the rate from `optim.lr`, which this module doesn't use
    assert "  schedule " not in printed
    one, two = weights_of(train.folder / "one"), weights_of(train.folder / "two")
    for name, weight in expected.items():
        assert torch.equal(one[name], weight)
        torch.testing.assert_close(two[name], weight, rtol=1e-5, atol=1e-6)
    for run in ("one", "two"):
        last = rows_of(train.folder / run)[-1]
        assert float(last["val/loss"]) == pytest.approx(float(measured["val/loss"]), rel=1e-5)
        assert float(last["val/acc"]) == pytest.approx(float(measured["val/acc"]))
        assert float(last["throughput/samples_per_second"]) > 0
        assert [name for name in last if "token" in name or "perplexity" in name] == []
        summary = train.summary(run)
        assert (summary["status"], summary["samples"]) == ("done", 160)
        assert "peak_lr" not in summary
        assert summary["monitored_value"] == pytest.approx(float(last["val/loss"]))
        assert [name for name in summary if "token" in name or "perplexity" in name] == []
    assert [*(train.folder / "two/wandb").glob("offline-run-*")]


@quiet
@pytest.mark.slow
def test_the_trainer_clips_its_gradients_also_with_exact_sums_on_two_ranks(train):
    expected, _ = trained_by_lightning(gradient_clip_val=0.01)
    clipped = ("module.dropout=0", "trainer.gradient_clip_val=0.01")
    train(*clipped, "run_dir=run", "trainer.devices=2", "batch.exact_micro_size=2")
    for name, weight in weights_of(train.folder / "run").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_kill_changes_nothing_if_the_run_continues_where_an_epoch_begins(train):
    two = ("trainer.devices=2", "checkpoint.every=10")
    train(*two, "run_dir=whole")
    killer = "+callbacks.killer._target_=mine.KillOnce"
    train(*two, killer, "memory=10", "run_dir=killed")
    assert (train.folder / "killed-once").exists()
    log = (train.folder / "killed/train.log").read_text()
    assert "continues from step 10, kept in memory" in log
    whole, killed = train.summary("whole"), train.summary("killed")
    assert killed["weights"]["20"] == whole["weights"]["20"]
    assert killed["monitored_value"] == whole["monitored_value"]


@pytest.mark.slow
def test_a_run_is_resumed_with_its_arguments_and_refuses_others(train):
    train("run_dir=whole", "module.lr=3e-3")
    train("run_dir=run", "module.lr=3e-3", "max_steps=10")
    train.command("train", "run_dir=run", "resume=auto", "max_steps=20")
    assert train.summary("run")["weights"]["20"] == train.summary("whole")["weights"]["20"]
    again = ("train", "run_dir=run", "resume=auto", "max_steps=30")
    for word in ("module.lr=1e-3", "module.dropout=0.5"):  # the latter has its default so far
        error = train.command(*again, word, status=2).stderr
        assert f"keeps its settings, but got {word.partition('=')[0]}=" in error


@pytest.mark.slow
def test_a_run_whose_experiment_says_nothing_of_the_gpt_is_resumed(train):
    """Its schedule, of which nothing is set, isn't asked for."""
    (train.folder / "conf/experiment").mkdir()
    bare = train.folder / "conf/experiment/bare.yaml"
    bare.write_text("# @package _global_\nbatch:\n  global_size: 8\n  reference_size: 8\n")
    train("experiment=bare", "run_dir=run", "max_steps=10")
    train.command("train", "run_dir=run", "resume=auto", "max_steps=20")
    train("experiment=bare", "run_dir=whole")
    assert train.summary("run")["weights"]["20"] == train.summary("whole")["weights"]["20"]


@pytest.mark.slow
def test_verify_confirms_a_run_that_is_saved_where_an_epoch_and_its_schedule_end(train):
    target = "module._target_=mine.Scheduled"
    train(target, "checkpoint.every=10", "checkpoint.keep_last=9", "max_steps=25", "run_dir=run")
    printed = train.command("verify", "run").stdout
    assert "saved states         3 of 3 equal" in printed


@pytest.mark.slow
def test_a_sweep_of_an_argument_gets_the_monitored_value(train):
    watched = ("checkpoint.monitor=val/acc", "checkpoint.mode=max", "checkpoint.every=10")
    printed = train("--multirun", "run_dir=sweep", "module.lr=1e-5,1e-2", *watched).stdout
    assert "step 20/20  val_acc " in printed
    table = printed.partition("\njob  exit     value\n")[2].splitlines()
    summaries = [train.summary(f"sweep/{number}") for number in range(2)]
    for number, (line, summary) in enumerate(zip(table, summaries, strict=True)):
        rows = rows_of(train.folder / f"sweep/{number}")
        values = [float(row["val/acc"]) for row in rows if row["val/acc"]]
        assert f"{values[-1]:.4f}" in line
        assert summary["monitored_value"] == pytest.approx(values[-1])
        assert summary["best_value"] == pytest.approx(max(values))
    assert table[1].endswith("module.lr=0.01")


@pytest.mark.slow
def test_evaluate_gives_what_its_steps_log_on_any_number_of_ranks(train):
    train("run_dir=run")
    last = rows_of(train.folder / "run")[-1]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
    words += ["lockstep_gpt", "evaluate", "run", "--json"]
    two = subprocess.run(
        words, cwd=train.folder, capture_output=True, text=True, timeout=240, check=True
    )
    one = train.command("evaluate", "run", "--json")
    assert one.stderr == ""
    for result in (json.loads(one.stdout), json.loads(two.stdout)):
        assert result.keys() == {"checkpoint", "val/loss", "val/acc"}
        assert result["val/loss"] == pytest.approx(float(last["val/loss"]), rel=1e-6)
        assert result["val/acc"] == float(last["val/acc"])
    lines = train.command("evaluate", "run", "--split", "test").stdout.splitlines()
    assert lines[0] == "run/checkpoints/step=000020.ckpt on the test split"
    assert [line.split()[0] for line in lines[1:]] == ["test/loss", "test/acc"]
    for name in ("generate", "evaluate --data mine.py"):
        command, *more = name.split()
        refused = train.command(command, "run", *more, status=2)
        assert "has weights of mine.Module, and this command is for the GPT" in refused.stderr


@pytest.mark.slow
def test_classes_that_only_a_foreign_run_names_need_the_users_trust(train, tmp_path):
    train("run_dir=run")
    other = {"XDG_STATE_HOME": str(tmp_path / "of another user")}
    refused = train.command("evaluate", "run", status=2, **other)
    assert "if you trust its author, set --trust" in refused.stderr
    train.command("evaluate", "run", "--trust", **other)


@pytest.mark.slow
def test_layers_of_configure_model_are_sharded_as_it_says_and_resumed(train):
    two = ("trainer.devices=2", "module.dropout=0")
    train(*two, "module._target_=mine.Placed", "run_dir=replicas")
    train(*two, "module._target_=mine.Placed", "strategy=fsdp2", "run_dir=shards")
    shards = weights_of(train.folder / "shards")
    for name, weight in weights_of(train.folder / "replicas").items():
        torch.testing.assert_close(shards[name], weight, rtol=1e-5, atol=1e-6)
    refused = train(*two, "strategy=fsdp2", "run_dir=none", status=2)
    line = "strategy=fsdp2 shards what `configure_model` of Module gives to"
    assert line in refused.stdout + refused.stderr
    late = ("module._target_=mine.Late", "run_dir=late")
    train(*late, "max_steps=10")
    train.command("train", "run_dir=late", "resume=auto", "max_steps=20")
    assert train.summary("late")["status"] == "done"


@quiet
@pytest.mark.slow
def test_a_notebook_trains_it_as_the_command_does(train, composed, monkeypatch):
    train("module.dropout=0", "run_dir=run")
    (train.folder / "noted.py").write_text(MINE)
    monkeypatch.chdir(train.folder)
    targets = ("module._target_=noted.Module", "data._target_=noted.Data")
    words = ("--config-dir", "conf", "module=mine", "data=mine", "trainer=cpu", "logger=none")
    cfg = composed(*words, *SHORT, *targets, "module.dropout=0", "trainer.devices=1")
    module, data, trainer = program.build(cfg, lockstep.Run.alone(config=cfg))
    trainer.fit(module, data)
    weights = module.state_dict()
    for name, weight in weights_of(train.folder / "run").items():
        assert torch.equal(weights[name], weight)


@pytest.mark.slow
def test_a_module_of_ones_own_may_train_on_our_tokens(train):
    words = ["train", "--config-dir", "conf", "module=mine", "module._target_=mine.OnTokens"]
    words += ["experiment=smoke", "logger=none", "trainer=cpu", "model.block_size=16", *SHORT]
    train.command(*words, f"data.root={train.command.data_root}", "run_dir=run")
    summary = train.summary("run")
    assert summary["tokens"] == 20 * 8 * 16
    assert rows_of(train.folder / "run")[-1]["trainer/tokens"] == str(20 * 8 * 16)


THREE = """
import torch
from lockstep_gpt.data import Tokens
from lockstep_gpt.module import GPTModule


class Module(GPTModule):
    def _loss(self, batch, mean):
        *pair, weights = batch
        return super()._loss(pair, mean) * weights.mean()


class Data(Tokens):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        pair = super().on_after_batch_transfer(batch, dataloader_idx)
        return *pair, torch.ones(len(pair[0]))
"""


@pytest.mark.slow
def test_what_a_run_of_derived_classes_suggests_works(command):
    """Batches of three tensors: `evaluate` is suggested and runs; `generate` isn't."""
    (command.folder / "three.py").write_text(THREE)
    derived = ["module._target_=three.Module", "data._target_=three.Data"]
    printed = command.train(*derived, "max_steps=2", "run_dir=run").stdout
    suggested = printed.partition("\nnext\n")[2].split("\n")
    names = [line.split()[-2] for line in suggested if line.endswith(" run")]
    assert names == ["evaluate"]
    result = json.loads(command("evaluate", "run", "--json").stdout)
    assert result["val/loss"] > 0
    assert "tokens" not in result  # what its batches count isn't known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["module.lrr=1"], "unknown setting module.lrr; did you mean module.lr?"),
        (["+module.lrr=1"], "module.lrr=1: Module has no argument lrr; did you mean lr?"),
        (["+data.roots=x"], "data.roots=x: Data has no argument roots; did you mean root?"),
        (["module._target_=mine.Data"], "module: Data needs batch; set module.batch"),
        (["module._target_=mine.KillOnce"], "module._target_=mine.KillOnce names no LightningMod"),
        (["checkpoint.monitor=val/accuracy"], "monitor=val/accuracy decides which checkpoints"),
    ],
)
def test_a_mistake_that_only_its_class_shows_is_one_line(train, words, line):
    printed = train("run_dir=run", *words, status=2)
    assert line in printed.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["module._target_=mine.Modul"], "module._target_=mine.Modul: mine has no Modul; did you"),
        (["module._target_=nine.Module"], "module._target_=nine.Module: there is no module nine"),
        (["trainer.gradient_clip_valu=1"], "trainer.gradient_clip_valu"),
    ],
)
def test_a_mistake_in_its_settings_is_one_line_before_anything_starts(train, words, line):
    error = train("run_dir=run", *words, status=2).stderr
    assert line in error
    assert error.count("\n") == 1
    assert not (train.folder / "run").exists()
