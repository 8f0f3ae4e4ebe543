"""What torch doesn't offer in public. A test fails once torch no longer needs the patch."""

import inspect

import pytest
import torch
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep_gpt import torch_patches


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_kernel_of_attention_is_the_one_that_is_allowed(kernel):
    q = torch.empty(1, 2, 128, 32)
    with sdpa_kernel(kernel):
        assert torch_patches.causal_attention_kernel(q) == kernel


def updated(skip):
    """Return a weight after one update by a loss scaler that was told to `skip` it."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    torch_patches.mark_overflow(scaler, optimizer, torch.tensor(float(skip)))
    scaler.step(optimizer)
    return weight.item()


def test_a_marked_update_is_skipped_and_an_unmarked_one_is_not():
    assert updated(skip=True) == 1.0
    assert updated(skip=False) == 0.0


def test_an_operation_declares_which_arguments_it_writes():
    (weight, *_) = torch_patches.declared_arguments(torch.ops.aten.add_.Tensor)
    assert weight.alias_info.is_write
    (weight, *_) = torch_patches.declared_arguments(torch.ops.aten.add.Tensor)
    assert weight.alias_info is None


def test_callers_have_the_names_that_torch_finds_by_reading_their_source(monkeypatch):
    own = rendezvous.get_method_name
    source = inspect.getsource(own)
    monkeypatch.setattr(rendezvous, "get_method_name", own)  # restored afterward
    torch_patches.name_callers_without_source()
    assert "inspect.stack" in source or rendezvous.get_method_name is not own

    def caller(name_of):
        return inner(name_of)

    def inner(name_of):
        return name_of()

    assert caller(rendezvous.get_method_name) == "caller"
