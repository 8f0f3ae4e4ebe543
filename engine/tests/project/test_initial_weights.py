"""`init_from`: the weights of another run, or a one-line reason why not."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lockstep_gpt.gpt import GPT
from lockstep_gpt.initial_weights import load_initial_weights
from lockstep_gpt.modern import ModernGPT
from lockstep_gpt.trained_model import load_model

from lockstep.checkpoints import reading as checkpoint
from lockstep.errors import UserError
from lockstep.ranks import ranks
from lockstep.tokens.tokenizer import ByteTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

SHAPE = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}  # as `saved_run` saves
STILL = ["optim.lr=1e-12", "optim.weight_decay=0", "schedule.warmup=0"]


@pytest.fixture
def source(finished, command):
    """A copy of a finished run of the smoke experiment, which a test may delete."""
    return Path(shutil.copytree(finished[0].folder / "runs/first", command.folder / "source"))


def begun(path, tokenizer=None, kind=GPT, **changes):
    """Return a new model that has begun with the weights of a run."""
    torch.manual_seed(2)
    tokenizer = tokenizer or ByteTokenizer()
    model = kind(tokenizer.vocab_size, **{**SHAPE, **changes}).eval()
    data = SimpleNamespace(tokenizer=tokenizer)
    load_initial_weights(str(path), SimpleNamespace(model=model), data)
    return model


def saved_as(tmp_path, model, tokenizer, **arguments):
    """Save a model as a run does, and return the run."""
    kind = type(model)
    target = {"_target_": f"{kind.__module__}.{kind.__qualname__}", "_partial_": True}
    content = {
        "config": {"model": {**target, **arguments}},
        "Tokens": {"tokenizer": tokenizer.to_dict(), "fingerprint": "0" * 8},
        "state_dict": {f"model.{name}": each for name, each in model.state_dict().items()},
    }
    path = checkpoint.checkpoint_path(tmp_path / "run/checkpoints", 1)
    checkpoint.write_checkpoint(content, path)
    return tmp_path / "run"


def weights_of(command, run, step):
    path = command.folder / run / f"checkpoints/step={step:06d}.ckpt"
    return torch.load(path, weights_only=True)["state_dict"]


@pytest.mark.slow
def test_a_run_begins_with_another_s_weights_and_a_resume_does_not(command, source):
    words = [f"init_from={source}", *STILL, "run_dir=runs/tuned"]
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


def test_what_is_no_run_is_one_line(command, tmp_path):
    (tmp_path / "theirs").mkdir()
    done = command.train(f"init_from={tmp_path / 'theirs'}", "run_dir=runs/tuned", status=2)
    place = re.escape(f"init_from={tmp_path / 'theirs'}")
    # Without the extra hub, nothing here reads a folder of transformers.
    fault = "is (neither a run nor a folder of transformers: its|no run, and a transformers)"
    assert re.search(f"{place} {fault} ", done.stdout + done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    assert not (command.folder / "runs/tuned").exists()


@pytest.mark.slow
def test_two_ranks_start_like_one(check_two_ranks_start_like_one, source):
    check_two_ranks_start_like_one(source)


MISTAKES = {
    "model.n_layer=1": "has n_layer=2, and model.n_layer=1; set model.n_layer=2",
    "model.block_size=33": "has learned positions for 32 tokens, and model.block_size=33; set "
    "model.block_size=32",
    "data=synthetic": "has another tokenizer than the data; set data and tokenizer as in its",
}


@pytest.mark.slow
@pytest.mark.parametrize("word", MISTAKES)
def test_unsuitable_weights_fail_in_one_line_and_leave_no_run(command, source, word):
    words = [f"init_from={source}", "run_dir=runs/tuned"]
    done = command.train(*words, word, status=2)
    assert f"init_from={source} {MISTAKES[word]}" in done.stdout + done.stderr
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


def test_a_context_may_grow_where_positions_are_not_learned(tmp_path):
    theirs = ModernGPT(256, **SHAPE).eval()
    run = saved_as(tmp_path, theirs, ByteTokenizer(), **SHAPE)
    tokens = torch.randint(256, (2, 64))
    ours = begun(run, kind=ModernGPT, block_size=128)
    assert torch.equal(ours(tokens), theirs(tokens))
    assert ours(torch.randint(256, (1, 128))).isfinite().all()


OTHERS = {
    "n_head": ({"n_head": 4}, "has n_head=2, and model.n_head=4; set model.n_head=2"),
    "n_embd": ({"n_embd": 32}, "has n_embd=16, and model.n_embd=32; set model.n_embd=16"),
    "bias": ({"bias": False}, "has bias=true, and model.bias=false; set model.bias=true"),
    "kind": (
        {"kind": ModernGPT},
        "has model._target_=lockstep_gpt.gpt.GPT, and here it is "
        "lockstep_gpt.modern.ModernGPT; "
        "set model=gpt model.n_layer=1 "
        "model.n_head=2 model.n_embd=16 model.bias=true",
    ),
    "two": (
        {"n_head": 4, "n_embd": 32},
        "has n_head=2, and model.n_head=4; n_embd=16, and model.n_embd=32; "
        "set model.n_head=2 model.n_embd=16",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_shape_is_refused_by_its_setting(saved_run, name):
    run = saved_run(ByteTokenizer())
    changes, line = OTHERS[name]
    with pytest.raises(UserError) as refusal:
        begun(run, **changes)
    assert str(refusal.value) == f"init_from={run} {line}"


@pytest.mark.slow
def test_what_the_refusal_of_another_model_and_tokenizer_says_can_be_typed(command):
    (command.folder / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (command.folder / "texts" / name).write_text(f"{name}: some words to learn from. " * 400)
    alone = ("launch.inline=true", "data.root=data")
    text = ("data=text", "data.source.path=texts", "data.source.val_fraction=0.3", "tokenizer=bpe")
    command.train(*text, *alone, "data.source.vocab_size=270", "model=modern_nano", "run_dir=one")
    begin = ("init_from=one", "run_dir=two", *alone)
    refusal = command.train(*begin, status=2).stderr
    words = refusal.rstrip().rpartition("; set ")[2].split()
    assert words[0] == "model=modern"
    assert words[-1].startswith("tokenizer=data/text-")
    command.train(*begin, *words, "max_steps=5")
    assert command.summary("two")["status"] == "done"


N_GRAMS = {
    "ngram_rows": ({"ngram_rows": 32}, "has ngram_rows=64, and model.ngram_rows=32; set model."),
    "longest_ngram": ({"longest_ngram": 4}, "has longest_ngram=3, and model.longest_ngram=4; set"),
    "n_kv_head": (
        {"n_kv_head": 1},
        "has n_kv_head=2, and model.n_kv_head=1; set model.n_",
    ),
}


@pytest.mark.parametrize("name", N_GRAMS)
def test_another_shape_of_a_modern_model_is_refused_by_its_setting(tmp_path, name):
    arguments = {**SHAPE, "n_kv_head": None, "ngram_rows": 64, "longest_ngram": 3}
    theirs = ModernGPT(256, **arguments)
    run = saved_as(tmp_path, theirs, ByteTokenizer(), **arguments)
    changes, line = N_GRAMS[name]
    with pytest.raises(UserError, match=line):
        begun(run, kind=ModernGPT, **{**arguments, **changes})


def test_the_longest_n_gram_does_not_matter_without_any(tmp_path):
    run = saved_as(tmp_path, ModernGPT(256, **SHAPE), ByteTokenizer(), **SHAPE, longest_ngram=2)
    begun(run, kind=ModernGPT, longest_ngram=3)


def test_a_module_without_one_of_our_models_gets_all_weights(tmp_path):
    class Owners(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 3)

    torch.manual_seed(0)
    theirs, ours = Owners(), Owners()
    path = checkpoint.checkpoint_path(tmp_path / "run/checkpoints", 1)
    checkpoint.write_checkpoint({"config": {}, "state_dict": theirs.state_dict()}, path)
    load_initial_weights(str(tmp_path / "run"), ours, None)
    assert torch.equal(ours.network.weight, theirs.network.weight)


def test_tokens_without_text_need_the_same_tokenizer(saved_run):
    of_numbers = from_dict({"kind": "numbers", "vocab_size": 256})
    run = saved_run(of_numbers)
    begun(run, of_numbers)
    with pytest.raises(UserError, match="has another tokenizer than the data; set data"):
        begun(run, ByteTokenizer())


def test_weights_that_differ_between_ranks_are_rejected(saved_run, monkeypatch):
    run = saved_run(ByteTokenizer())
    monkeypatch.setattr(ranks, "from_each_rank", lambda digest: [digest, "other", digest])
    with pytest.raises(UserError, match="has other weights for rank 1 than for rank 0"):
        begun(run)
