"""Fixtures for all tests: miniature runs with real data, modules, and Trainers on the CPU."""

import contextlib
import json
import multiprocessing
import os
import re
import struct
import time
import traceback
import uuid
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning
import lockstep_gpt
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lockstep_gpt.data import Tokens
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.module import GPTModule
from lockstep_gpt.optim import adamw, muon
from omegaconf import DictConfig, OmegaConf

from lockstep import configs
from lockstep.batch import Batch
from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.checkpoints.reading import checkpoint_path
from lockstep.metrics.callback import Metrics
from lockstep.schedule import Schedule
from lockstep.strategies import placing as strategies
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import ByteTokenizer

MODEL = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
SAVED = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
BATCH = {"micro_size": 2, "global_size": 4, "reference_size": 4}
OPTIM = {"lr": 1e-2}
LIGHTNINGS_NOISE = [
    "`isinstance.treespec, LeafSpec.` is deprecated",
    "The '.*_dataloader' does not have many workers",
    "It is recommended to use `self.log",  # if there are ranks but no strategy for them
]


@dataclass
class Run:
    config: DictConfig
    batch: Batch
    schedule: Schedule
    data: Tokens
    module: GPTModule
    val_loss: float | None = None  # of the last `fit`

    def metrics(self, every, **settings):
        """Return what counts the run's tokens."""
        return Metrics(self.batch, every, **settings)

    @property
    def clipping(self):
        return ClipAndSkip(self.config.clip_norm, self.config.max_skipped)

    def checkpoints(self, folder):
        return Checkpoints(folder, content=self.content, **self.config.checkpoint)

    def content(self, _trainer):
        """Return what a `Run` adds to its checkpoints."""
        return {"config": {"max_steps": self.config.max_steps}}

    def fit(self, *callbacks, logger=False, ckpt_path=None, io=None, **settings):
        # On a CPU, Lightning would replace it with bfloat16.
        half = self.config.precision == "16-mixed"
        precision = [MixedPrecision("16-mixed", "cpu")] if half else []
        chosen = {type(callback) for callback in callbacks}
        first = [MicroBatchSeeds(self.config.seed)]
        if Metrics not in chosen:
            first.append(Metrics(self.batch, every=self.config.log_every))
        if "strategy" not in settings and self.batch.is_exact:
            settings["strategy"] = strategies.auto(batch=self.batch)
        last = [self.clipping]
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[*first, *callbacks, *last],
            logger=logger,
            plugins=[io or AtomicCheckpointIO(), *precision],
            max_steps=self.schedule.steps,
            max_epochs=-1,
            accumulate_grad_batches=self.batch.accumulation,
            val_check_interval=self.config.val_every * self.batch.accumulation,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_checkpointing=any(isinstance(callback, Checkpoints) for callback in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        with warnings.catch_warnings():
            for noise in LIGHTNINGS_NOISE:
                warnings.filterwarnings("ignore", noise)
            trainer.fit(self.module, self.data, ckpt_path=ckpt_path)
        if "val/loss" in trainer.callback_metrics:
            self.val_loss = float(trainer.callback_metrics["val/loss"])
        return trainer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Random tokens: 800 for training and 200 for validation."""
    root = tmp_path_factory.mktemp("data")
    text = np.random.default_rng(0).choice([*map(chr, range(48, 98))], 998)
    (root / "text").write_text("".join(text))
    return root


@pytest.fixture
def texts(tmp_path):
    """A folder of 25 text files of random words."""
    words = [f"{word} " for word in re.findall(r"\w+", ByteTokenizer.__doc__)]
    random = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for number in range(25):
        text = "".join(random.choice(words, size=15_000))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    return tmp_path / "texts"


@pytest.fixture
def new_run(folder):
    """Create a run of `max_steps` updates of two micro-batches of two samples each."""

    def make(*, model=None, optim=None, schedule=None, checkpoint=None, batch=None, **settings):
        optim = {**OPTIM, **(optim or {})}
        shape = {**MODEL, **(model or {})}
        make_model = {"gpt": GPT, "modern": ModernGPT}[shape.pop("architecture", "gpt")]
        make_optimizer = {"adamw": adamw, "muon": muon}[optim.pop("algorithm", "adamw")]
        config = OmegaConf.create(
            {
                "seed": 1337,
                "max_steps": 6,
                "val_every": 3,
                "log_every": 2,
                "precision": "32-true",
                "compile": False,
                "clip_norm": 1.0,
                "max_skipped": 0,
                **settings,
                "batch": {**BATCH, **(batch or {})},
                "model": shape,
                "optim": optim,
                "checkpoint": checkpoint or {},
            }
        )
        spread = Batch(**config.batch).spread_over(1)
        source = Text(path=str(folder / "text"), val_fraction=0.198)
        data = Tokens(
            source, config.model.block_size, batch=spread, seed=config.seed, root=str(folder)
        )
        course = Schedule(config.max_steps, config.optim.lr, **(schedule or {}))
        torch.manual_seed(config.seed)
        module = GPTModule(
            partial(make_model, **shape),
            partial(make_optimizer, **config.optim),
            course,
            data.vocab_size,
            compiled=config.compile,
        )
        if config.precision == "64-true":
            module.double()
        return Run(config, spread, course, data, module)

    return make


def _rank(rank, size, store, function, queue):
    torch.set_num_threads(1)  # a forked process lacks the threads that OpenMP relies on
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    try:
        queue.put((rank, function(rank)))
    except Exception as error:
        queue.put((rank, "".join(traceback.format_exception(error))))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)  # the forked pytest must not continue


@pytest.fixture
def on_ranks(tmp_path):
    """Run a function on `size` gloo ranks, forks of this process; return what they return."""

    def run(size, function):
        context = multiprocessing.get_context("fork")
        queue, store = context.Queue(), tmp_path / uuid.uuid4().hex
        arguments = (size, store, function, queue)
        ranks = [
            context.Process(target=_rank, args=(rank, *arguments), daemon=True)
            for rank in range(size)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forking with threads
            for rank in ranks:
                rank.start()
        try:
            results = dict(queue.get(timeout=240) for _ in ranks)
        finally:
            for rank in ranks:
                rank.join(1)
                rank.kill()  # otherwise, it would wait forever for a rank that hangs
        return [results[rank] for rank in range(size)]

    return run


BLOCK, HEADER = 32768, 7


def read_records(path):
    """Read a `.wandb` file: LevelDB's log format after 7 bytes, a protobuf in each record."""
    from wandb.proto import wandb_internal_pb2  # all other fixtures work without wandb

    content, position, parts = path.read_bytes(), HEADER, []
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER
        parts.append(content[position : position + length])
        position += length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(b"".join(parts))
            parts = []


def read_offline_runs(folder):
    """Return the run ids, the configuration, and the rows of all offline files below.

    wandb's own process writes them; it finishes a moment after the run has ended.
    """
    ids, config, rows = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        end = time.monotonic() + 60
        while not any(record.HasField("exit") for record in read_records(path)):
            assert time.monotonic() < end, f"{path} has no end"
            time.sleep(0.1)
        for record in read_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                update = record.run.config.update
                config.update({item.key: json.loads(item.value_json) for item in update})
            elif record.HasField("history"):
                items = record.history.item
                rows.append(
                    {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                )
    return ids, config, rows


@pytest.fixture(scope="session")
def records():
    return read_records


@pytest.fixture(scope="session")
def read_offline():
    return read_offline_runs


def _file(group, choice):
    """Return the values in a YAML file."""
    folders = (lockstep_gpt.CONFIGS, Path(configs.__file__).parent)
    file = next(each for folder in folders if (each := folder / f"{group}/{choice}.yaml").is_file())
    return OmegaConf.to_container(OmegaConf.load(file))


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory):
    """Return a function that saves a model for `tokenizer` as if it was trained on a source.

    The likeliest token is never one of `never`. `settings` are of the source, or of the data.
    """

    def save(tokenizer, never=(), source="stdlib", **settings):
        of_data = _file("data", "tokens")
        of_source = {name: value for name, value in settings.items() if name not in of_data}
        of_data |= {name: value for name, value in settings.items() if name in of_data}
        torch.manual_seed(0)
        model = GPT(tokenizer.vocab_size, **SAVED, dropout=0.5)
        for parameter in model.parameters():
            parameter.data.mul_(5)  # far from uniform, so choices differ
        model.token_embedding.weight.data[[*never]] = 0
        content = {
            "config": {
                "seed": 1,
                "max_steps": 1,
                "precision": "32-true",
                "tokenizer": "bytes",
                "val_tokens": None,
                "compile": False,
                "lr_scaling": "none",
                "batch": {"_target_": "lockstep.Batch", "global_size": 1},
                "module": _file("module", "gpt"),
                "model": {**_file("model", "gpt"), **SAVED, "dropout": 0.5},
                "optim": {
                    **OPTIM,
                    "_target_": "lockstep_gpt.optim.adamw",
                    "_partial_": True,
                },
                "schedule": {"_target_": "lockstep.Schedule"},
                "packing": _file("packing", "stream"),
                "data": {
                    **of_data,
                    "source": {**_file("source", source), **of_source},
                },
            },
            "Tokens": {"tokenizer": tokenizer.to_dict(), "fingerprint": None},
            "pytorch-lightning_version": lightning.__version__,
            "global_step": 1,
            "state_dict": {f"model.{name}": weight for name, weight in model.state_dict().items()},
        }
        run = tmp_path_factory.mktemp("run")
        AtomicCheckpointIO().save_checkpoint(content, checkpoint_path(run / "checkpoints", 1))
        return run

    return save


@pytest.fixture
def attention_operations():
    """Record which kernels of scaled dot-product attention run in a block, such as `flash`."""

    @contextlib.contextmanager
    def record():
        ran = []
        with torch.profiler.profile(acc_events=True) as profile:
            yield ran
        for event in profile.events():
            found = re.match(r"aten::_scaled_dot_product_(\w+)", event.name)
            if found:
                ran.append(re.sub("_?attention(_for_cpu)?_?", "", found[1]))

    return record
