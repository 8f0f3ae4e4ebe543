"""A model's class checks its own arguments, and needs nothing else to be made."""

from pathlib import Path

import pytest
import torch

import lockstep_gpt.model
from lockstep_gpt.errors import UserError
from lockstep_gpt.gpt import GPT
from lockstep_gpt.model.model_settings import ModelConfig, build_gpt
from lockstep_gpt.modern import ModernGPT

SHAPE = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
WRONG = {
    "model.n_embd=100 is not divisible by model.n_head=3; nearest: model.n_embd=99": {
        "n_embd": 100,
        "n_head": 3,
    },
    "model.block_size=0 must be at least 1": {"block_size": 0},
    "model.n_layer=0 must be at least 1": {"n_layer": 0},
    "model.n_layer=10001 must be at most 10000": {"n_layer": 10_001},
    "model.n_head=0 must be at least 1": {"n_head": 0},
    "model.n_embd=-2 must be at least 1": {"n_embd": -2},
    "model.dropout=1.0 must be at least 0 and below 1": {"dropout": 1.0},
}


@pytest.mark.parametrize("kind", [GPT, ModernGPT])
@pytest.mark.parametrize("line", WRONG)
def test_a_shape_that_cannot_be_is_one_line(kind, line):
    with pytest.raises(UserError) as refused:
        kind(100, **{**SHAPE, **WRONG[line]})
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"n_kv_head": 3}, "model.n_kv_head=3 does not divide model.n_head=4"),
        ({"n_kv_head": 0}, "model.n_kv_head=0 must be at least 1"),
        ({"ngram_rows": -1}, "model.ngram_rows=-1 must be at least 0 and at most 100000000"),
        ({"longest_ngram": 1}, "model.longest_ngram=1 must be at least 2 and at most 32"),
    ],
)
def test_what_only_modern_models_have_is_checked_there(change, line):
    with pytest.raises(UserError) as refused:
        ModernGPT(100, **{**SHAPE, "n_head": 4, **change})
    assert str(refused.value) == line


def test_the_residual_stream_has_one_of_two_types():
    line = "model.residual_dtype=float16 is not one of float32, bfloat16"
    with pytest.raises(UserError, match=f"^{line}$"):
        GPT(100, **SHAPE, residual_dtype="float16")


@pytest.mark.parametrize(
    ("kind", "own", "settings"),
    [
        (GPT, {"bias": False, "dropout": 0.1}, {}),
        (
            ModernGPT,
            {"n_kv_head": 1, "ngram_rows": 32, "longest_ngram": 3},
            {"architecture": "modern", "bias": False},
        ),
    ],
)
def test_plain_arguments_make_the_model_that_settings_make(kind, own, settings):
    torch.manual_seed(3)
    plain = kind(vocab_size=100, **SHAPE, **own)
    torch.manual_seed(3)
    built = build_gpt(ModelConfig(**SHAPE, **own, **settings), 100)
    weights = built.state_dict()
    assert list(plain.state_dict()) == list(weights)
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.state_dict().items())
    names = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")
    assert [getattr(plain, name) for name in names] == [100, 16, 2, 2, 32]


def test_no_model_reads_settings():
    (folder,) = map(Path, lockstep_gpt.model.__path__)
    readers = [file.name for file in folder.glob("*.py") if "model_settings" in file.read_text()]
    assert readers == []
