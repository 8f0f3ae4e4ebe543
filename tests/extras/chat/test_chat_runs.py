"""The real command: a fine-tune on conversations, resumed and on ranks, with and without LoRA."""

import json
import shutil

import pytest
import torch

from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import load_index
from lockstep_gpt.extras.chat.template import template_of
from lockstep_gpt.registry import installed
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.trained_model import load_model

pytestmark = pytest.mark.skipif(
    "datasets" not in installed(),
    reason="no such extra: datasets, which keeps conversations apart",
)
KILL = """
import os, signal, lightning
class Kill(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 5 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = ("max_steps=8", "val_every=4", "checkpoint.every=4", "optim.warmup_steps=2")
SAMPLES = ("batch.global_size=4", "data.val_tokens=512", "data.val_fraction=0.1")
TWO = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")


@pytest.fixture
def tuned(finished, command, questions):
    """Return a function that fine-tunes the finished run of the smoke experiment."""
    base = command.folder / "base"
    shutil.copytree(finished[0].folder / "runs/first", base)

    def tune(*overrides, status=0, inline=True, **environment):
        words = (
            "experiment=chat",
            f"model.init_from={base}",
            f"data.path={questions}",
            *STEPS,
            *SAMPLES,
        )
        quiet = ("logger=none", "precision=32-true", f"launch.inline={str(inline).lower()}")
        return command(
            "train", *words, *STEPS, *SAMPLES, *quiet, *overrides, status=status, **environment
        )

    return tune


def state(command, run, step=8):
    path = command.folder / run / f"checkpoints/step={step:06d}.ckpt"
    return torch.load(path)["state_dict"]


def test_a_fine_tune_learns_answers_from_the_weights_of_a_run(tuned, command):
    out = tuned("run_dir=run", "max_steps=40", "val_every=20", "optim.lr=0.01").stdout
    assert "weights of " in out
    assert "base, 32 of 32 positions" in out
    first = next(line for line in out.splitlines() if "val_loss" in line)
    assert command.summary("run")["val_loss"] < float(first.rpartition(" ")[2]) < 5.5


@pytest.mark.slow
@pytest.mark.parametrize("rank", [(), ("lora.rank=4",)], ids=["all weights", "lora"])
@pytest.mark.usefixtures("quick_ranks")
def test_killed_and_resumed_fine_tune_ends_with_the_same_bits(tuned, command, rank):
    tuned("run_dir=whole", *rank)
    (command.folder / "killer.py").write_text(KILL)
    kill = ("+callbacks.kill._target_=killer.Kill", "trainer=cpu", "trainer.devices=1")
    out = tuned("run_dir=again", *kill, *rank, inline=False, PYTHONPATH=str(command.folder))
    assert "restarting all ranks (1 of 3)" in out.stderr
    uninterrupted, killed = state(command, "whole"), state(command, "again")
    assert uninterrupted.keys() == killed.keys()
    assert all(torch.equal(uninterrupted[name], killed[name]) for name in uninterrupted)


ADAPTERS = {
    "all weights": (),
    "lora": ("lora.rank=4",),
    "lora with alpha": ("lora.rank=4", "lora.alpha=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ADAPTERS)
def test_a_fine_tune_resumes_and_generates_the_same_bits(adapters, tuned, command):
    tuned("run_dir=run", *ADAPTERS[adapters], "checkpoint.keep_last=2", "optim.lr=0.01")
    run = command.folder / "run"
    uninterrupted, half = state(command, "run"), state(command, "run", step=4)
    words = ("generate", "run", "--prompt", "add", "--length", "20")
    output = command(*words).stdout
    for path in run.glob("checkpoints/step=000008*"):
        path.unlink()
    (run / "summary.json").unlink()
    command("train", "run_dir=run", "resume=auto")
    again = state(command, "run")
    assert uninterrupted.keys() == again.keys()
    assert all(torch.equal(uninterrupted[name], again[name]) for name in uninterrupted)
    assert not all(torch.equal(half[name], again[name]) for name in uninterrupted)
    assert command(*words).stdout == output


@pytest.mark.slow
@pytest.mark.parametrize("rank", [(), ("lora.rank=4",)], ids=["all weights", "lora"])
@pytest.mark.usefixtures("quick_ranks")
def test_two_ranks_give_the_weights_of_one_up_to_rounding(tuned, command, rank):
    even = ("precision=64-true", "batch.micro_size=2", *rank)
    tuned("run_dir=one", *even)
    tuned("run_dir=two", *even, *TWO, inline=False)
    one, two = state(command, "one"), state(command, "two")
    assert one.keys() == two.keys()
    largest = max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
    assert largest < 1e-9


def test_adapters_alone_are_saved_and_every_command_takes_them(tuned, command):
    tuned("run_dir=run", "lora.rank=4", "optim.lr=0.01")
    saved = state(command, "run")
    assert {name.rpartition(".")[2] for name in saved} == {"up", "down", "rows", "base_sha256"}
    assert sum(weight.nbytes for weight in saved.values()) < 30_000
    assert command("generate", "run", "--prompt", "add", "--length", "5").stdout.startswith("add")
    path = command.folder / "run/checkpoints/step=000008.ckpt"
    model, _, tokenizer = load_model(path)
    ids = template_of(tokenizer).render([{"role": "user", "content": "add 1 and 2"}], reply=True)
    assert model(torch.tensor([ids])).isfinite().all()
    base = load_model(command.folder / "base/checkpoints/step=000020.ckpt")[0]
    assert not torch.equal(model(torch.tensor([ids])), base(torch.tensor([ids])))


def test_adapters_without_their_weights_are_refused_in_one_line(tuned, command):
    tuned("run_dir=run", "lora.rank=4")
    (command.folder / "base").rename(command.folder / "moved")
    err = command("generate", "run", status=2).stderr
    assert f"model.init_from={command.folder / 'base'}" in err
    assert "\n" not in err.strip()
    command.train("run_dir=base", "seed=2")
    err = command("generate", "run", status=2).stderr
    assert "the adapters belong to other weights than model.init_from has now" in err


def test_another_fine_tune_begins_with_merged_adapters(tuned, command):
    tuned("run_dir=run", "lora.rank=4", "optim.lr=0.01")
    adapted = load_model(command.folder / "run/checkpoints/step=000008.ckpt")[0]
    run = command.folder / "run"
    words = (f"model.init_from={run}", "run_dir=again", "optim.lr=1e-12")
    tuned(*words)
    again = load_model(command.folder / "again/checkpoints/step=000008.ckpt")[0]
    tokens = torch.arange(32)[None]
    torch.testing.assert_close(again(tokens), adapted(tokens), rtol=1e-4, atol=1e-5)


MISTAKES = {
    ("lora.alpha=4",): "lora.alpha=4.0 needs lora.rank",
    ("lora.rank=0",): "lora.rank=0 must be at least 1",
    ("model.init_from=nowhere",): "model.init_from=nowhere is neither a run, a checkpoint in one",
    ("model.block_size=33",): "has learned positions for 32 tokens, and model.block_size=33; set",
    ("model.n_layer=3",): "has n_layer=2, and model.n_layer=3; set model.n_layer=2",
    ("data.longest=3",): "data.longest=3 must be at least 16",
    ("data.path=nowhere.jsonl",): "data.path=nowhere.jsonl matches no file; give a file,",
}


@pytest.mark.parametrize("words", MISTAKES, ids=str)
def test_a_mistake_is_one_line(tuned, words):
    err = tuned("run_dir=run", *words, status=2).stderr
    assert MISTAKES[words] in err
    assert "interpolation" not in err
    assert "\n" not in err.strip()


def test_an_experiment_without_initial_weights_says_what_it_needs(command):
    err = command("train", "experiment=chat", "run_dir=run", status=2).stderr
    assert "experiment=chat needs model.init_from; set it to a run, or to a transformers" in err


def test_adapters_without_initial_weights_are_refused(command):
    err = command.train("lora.rank=4", "run_dir=run", status=2).stderr
    assert "lora.rank=4 needs model.init_from, the weights it adapts" in err


def test_evaluation_and_validation_count_the_same_targets(tuned, command):
    tuned("run_dir=run", "data.val_tokens=null")
    metrics = json.loads(command("evaluate", "run", "--json").stdout)
    assert metrics["loss"] == pytest.approx(command.summary("run")["val_loss"], abs=1e-5)
    index = load_index(prepare(RunDirectory(command.folder / "run").load().data))
    assert 0.2 < metrics["tokens"] / index.splits["val"].tokens < 0.5
    assert "bits_per_byte" not in metrics


def test_a_folder_for_transformers_grows_by_the_special_tokens(tuned, command, folder, learned):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("lockstep_gpt.extras.hub", reason="no such extra")
    torch.manual_seed(1)
    size = {"vocab_size": learned["vocab_size"], "n_positions": 64, "n_embd": 32}
    config = transformers.GPT2Config(**size, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(folder)
    tuned(f"model.init_from={folder}", "run_dir=run", "optim.lr=1e-12")
    model, settings, tokenizer = load_model(command.folder / "run/checkpoints/step=000008.ckpt")
    assert settings.model.block_size == 64
    assert tokenizer.vocab_size == learned["vocab_size"] + 4
    rows = model.token_embedding.weight[learned["vocab_size"] : tokenizer.vocab_size]
    torch.testing.assert_close(rows, theirs.transformer.wte.weight[[0] * 4], rtol=0, atol=1e-6)
    tokens = torch.arange(1, 65)[None]  # 0 ends a document, which a mask would notice
    ours = model(tokens)[..., : learned["vocab_size"]]
    torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
