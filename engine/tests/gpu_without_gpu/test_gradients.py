"""What the GPU's test of each tensor's gradient finds, tried on a CPU."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

pytestmark = [  # torch's
    pytest.mark.filterwarnings("ignore:.*should not be instantiated. Methods on autograd"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]
ARCHITECTURES = ("gpt", "gpt, float32 residual", "modern")


@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bfloat16_gradients_are_right(gradients, wrong_gradients, architecture, in_chunks):
    errors = gradients(architecture, in_chunks=in_chunks).errors()
    assert len(errors) == (16 if architecture == "modern" else 28)
    assert min(errors.values()) > 1e-4  # it is bfloat16
    assert not wrong_gradients(errors)


@pytest.mark.slow
@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_bfloat16_gradients_are_right(gradients, wrong_gradients, architecture, in_chunks):
    torch._dynamo.reset()
    errors = gradients(architecture, in_chunks=in_chunks).errors(is_compiled=True)
    assert not wrong_gradients(errors)


@pytest.mark.parametrize("factor", [0.0, 0.95, 2.0, math.nan])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_wrong_gradient_among_all_is_found(gradients, wrong_gradients, architecture, factor):
    name = "blocks.1.mlp.expansion.weight"

    def spoil(model):
        model.get_parameter(name).register_hook(lambda gradient: gradient * factor)

    assert [*wrong_gradients(gradients(architecture).errors(spoil=spoil))] == [name]


def test_a_bfloat16_residual_stream_doubles_no_error(gradients):
    """The bfloat16 of the products is what rounds most."""
    narrow = gradients("gpt").errors()
    wide = gradients("gpt, float32 residual").errors()
    assert 1 < statistics.median(narrow.values()) / statistics.median(wide.values()) < 2
    assert max(narrow.values()) < 2 * max(wide.values())


def test_a_gradient_that_is_missing_is_found(gradients, wrong_gradients):
    def freeze(model):
        model.position_embedding.requires_grad_(False)

    wrong = wrong_gradients(gradients("gpt").errors(spoil=freeze))
    assert wrong == {"position_embedding.weight": math.inf}
