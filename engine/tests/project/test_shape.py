"""A model's class checks its own arguments, and needs nothing else to be made."""

import pytest
from lockstep_gpt.gpt import GPT
from lockstep_gpt.modern import ModernGPT

from lockstep.errors import UserError

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
    "model.n_embd=32.5 must be a whole number": {"n_embd": 32.5},
    "model.n_head=true must be a whole number": {"n_head": True},
    "model.dropout=nan must be a finite number": {"dropout": float("nan")},
    "model.dropout=half must be a number": {"dropout": "half"},
    "model.activation_checkpointing=1 must be true or false": {"activation_checkpointing": 1},
    "model.dropout=1.0 must be below 1": {"dropout": 1.0},
    "model.dropout=-0.1 must be at least 0": {"dropout": -0.1},
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
        ({"n_kv_head": 3}, "model.n_kv_head=3 does not divide model.n_head=4; set a divisor of it"),
        ({"n_kv_head": 0}, "model.n_kv_head=0 must be at least 1"),
        ({"ngram_rows": -1}, "model.ngram_rows=-1 must be at least 0"),
        ({"ngram_rows": 10**9}, "model.ngram_rows=1000000000 must be at most 100000000"),
        ({"longest_ngram": 1}, "model.longest_ngram=1 must be at least 2"),
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


@pytest.mark.parametrize("vocab_size", [0, None])
@pytest.mark.parametrize("kind", [GPT, ModernGPT])
def test_a_vocabulary_has_a_size(kind, vocab_size):
    line = r"^vocab_size=(0 must be at least 1|null is not known; )"
    with pytest.raises(UserError, match=line):
        kind(vocab_size, **SHAPE)
