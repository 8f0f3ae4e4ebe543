"""`model.init_from`: the weights of another run, or a one-line reason why not."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lockstep_gpt import extras, registry
from lockstep_gpt.tokens.tokenizer import ByteTokenizer
from lockstep_gpt.tokens.tokenizer_choice import from_dict
from lockstep_gpt.distributed import ranks
from lockstep_gpt.errors import UserError
from lockstep_gpt.model.model_settings import ModelConfig, build_gpt
from lockstep_gpt.run import checkpoint
from lockstep_gpt.settings import is_module
from lockstep_gpt.training.initial_weights import load_initial_weights
from lockstep_gpt.training.trained_model import load_model

SHAPE = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}  # as `saved_run` saves
STILL = ["optim.lr=1e-12", "optim.weight_decay=0", "optim.warmup_steps=0"]
NEEDS_MODERN = pytest.mark.skipif(not is_module("model", "modern"), reason="no model/modern.py")


@pytest.fixture
def without_hub(tmp_path, monkeypatch):
    """Make this process one of a project that has all other extras, but not hub."""
    folder = tmp_path / "extras"
    folder.mkdir()
    for name in registry.installed():
        if name != "hub":
            places = [Path(place) / name for place in extras.__path__]
            (folder / name).symlink_to(next(place for place in places if place.is_dir()))
    monkeypatch.setattr(extras, "__path__", [str(folder)])
    assert "hub" not in registry.installed()


@pytest.fixture
def source(finished, command):
    """A copy of a finished run of the smoke experiment, which a test may delete."""
    return Path(shutil.copytree(finished[0].folder / "runs/first", command.folder / "source"))


def begun(path, tokenizer=None, **changes):
    """Return a new model that has begun with the weights of a run."""
    torch.manual_seed(2)
    config = ModelConfig(**{**SHAPE, **changes}, init_from=str(path))
    tokenizer = tokenizer or ByteTokenizer()
    model = build_gpt(config, tokenizer.vocab_size).eval()
    load_initial_weights(config, model, tokenizer)
    return model


def saved_as(tmp_path, config, model, tokenizer):
    """Save a model as a run does, and return the run."""
    content = {
        "config": {
            "max_steps": 1,
            "batch": {"global_size": 1},
            "model": vars(config),
            "data": {"_target_": "lockstep_gpt.tokens.sources.stdlib.StandardLibrary"},
            "optim": {"algorithm": "adamw"},
        },
        "tokenizer": tokenizer.to_dict(),
        "state_dict": {f"model.{name}": each for name, each in model.state_dict().items()},
    }
    path = checkpoint.checkpoint_path(tmp_path / "run/checkpoints", 1)
    checkpoint.write_checkpoint(content, path)
    return tmp_path / "run"


def weights_of(command, run, step):
    path = command.folder / run / f"checkpoints/step={step:06d}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_hub")
def test_without_hub_a_run_begins_with_another_s_weights_and_a_resume_does_not(command, source):
    words = [f"model.init_from={source}", *STILL, "run_dir=runs/tuned"]
    out = command.train(*words, "max_steps=2").stdout
    assert f"weights of {source}, 32 of 32 positions" in out
    first = weights_of(command, "runs/tuned", 2)
    expected = weights_of(command, "source", 20)
    assert first.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(first[name], weight, msg=name)
    shutil.rmtree(source)
    again = command("train", "run_dir=runs/tuned", "resume=auto", "max_steps=3").stdout
    assert "weights of" not in again
    command.train("resume=runs/tuned", "max_steps=4", *STILL, "run_dir=runs/onward")
    onward = weights_of(command, "runs/onward", 4)
    for name, weight in expected.items():
        torch.testing.assert_close(onward[name], weight, msg=name)


@pytest.mark.usefixtures("without_hub")
def test_without_hub_a_transformers_folder_is_one_line_with_the_command(command, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    done = command.train(f"model.init_from={folder}", "run_dir=runs/tuned", status=2)
    line = (
        f"model.init_from={folder} is neither a run nor a checkpoint in one; name one. A "
        "transformers folder needs the extra hub ("
    )
    assert line in done.stderr
    assert done.stderr.endswith("add it: python3 scripts/dev.py update --add hub\n")
    assert "Traceback" not in done.stdout + done.stderr
    assert not (command.folder / "runs/tuned").exists()


@pytest.mark.slow
def test_two_ranks_start_like_one(check_two_ranks_start_like_one, source):
    check_two_ranks_start_like_one(source)


MISTAKES = {
    "model.n_layer=1": "has n_layer=2, and model.n_layer=1; set model.n_layer=2",
    "model.block_size=33": "has learned positions for 32 tokens, and model.block_size=33; set "
    "model.block_size=32",
    "data=synthetic": "has another tokenizer than the data; prepare the data with its own, ",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", MISTAKES)
def test_unsuitable_weights_fail_in_one_line_and_leave_no_run(command, source, word):
    words = [f"model.init_from={source}", "run_dir=runs/tuned"]
    done = command.train(*words, word, status=2)
    assert f"model.init_from={source} {MISTAKES[word]}" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (command.folder / "runs/tuned").exists()


def test_a_run_and_its_checkpoint_give_the_same_bits(saved_run):
    run = saved_run(ByteTokenizer())
    expected = load_model(checkpoint.find_checkpoint(run))[0].state_dict()
    for path in (run, checkpoint.find_checkpoint(run)):
        found = begun(path).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_shorter_context_uses_the_first_positions(saved_run):
    run = saved_run(ByteTokenizer())
    tokens = torch.randint(256, (2, 16))
    model = load_model(checkpoint.find_checkpoint(run))[0]
    torch.testing.assert_close(begun(run, block_size=16)(tokens), model(tokens))


@NEEDS_MODERN
def test_a_context_may_grow_where_positions_are_not_learned(tmp_path):
    shape = {"architecture": "modern", "bias": False}
    config = ModelConfig(**SHAPE, **shape)
    theirs = build_gpt(config, 256).eval()
    run = saved_as(tmp_path, config, theirs, ByteTokenizer())
    tokens = torch.randint(256, (2, 64))
    ours = begun(run, **shape, block_size=128)
    assert torch.equal(ours(tokens), theirs(tokens))
    assert ours(torch.randint(256, (1, 128))).isfinite().all()


OTHERS = {
    "n_head": ({"n_head": 4}, "has n_head=2, and model.n_head=4; set model.n_head=2"),
    "n_embd": ({"n_embd": 32}, "has n_embd=16, and model.n_embd=32; set model.n_embd=16"),
    "bias": ({"bias": False}, "has bias=true, and model.bias=false; set model.bias=true"),
    "architecture": (
        {"architecture": "modern", "bias": False},
        "has architecture=gpt, and model.architecture=modern; set model.architecture=gpt",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_MODERN if "arch" in name else ()) for name in OTHERS]
)
def test_another_shape_is_refused_by_its_setting(saved_run, name):
    run = saved_run(ByteTokenizer())
    changes, line = OTHERS[name]
    with pytest.raises(UserError) as refusal:
        begun(run, **changes)
    assert str(refusal.value) == f"model.init_from={run} {line}"


def test_tokens_without_text_need_the_same_tokenizer(saved_run):
    of_numbers = from_dict({"kind": "numbers", "vocab_size": 256})
    run = saved_run(of_numbers)
    begun(run, of_numbers)
    with pytest.raises(UserError, match="has another tokenizer than the data; prepare the data"):
        begun(run, ByteTokenizer())


def test_weights_that_differ_between_ranks_are_rejected(saved_run, monkeypatch):
    run = saved_run(ByteTokenizer())
    monkeypatch.setattr(ranks, "from_each_rank", lambda digest: [digest, "other", digest])
    with pytest.raises(UserError, match="has other weights for rank 1 than for rank 0"):
        begun(run)
