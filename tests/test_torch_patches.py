"""What torch doesn't offer in public.

A test of changed behavior fails once torch no longer needs the change.
A test of a private name fails once torch has something else under it.
"""

import inspect

import pytest
import torch
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep_gpt import torch_patches


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_kernel_of_attention_is_the_one_that_is_allowed(kernel):
    q = torch.empty(1, 2, 128, 32)
    with sdpa_kernel(kernel):
        assert torch_patches.attention_kernel(q, dropout=0.0) == kernel


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 256, 256, dtype=torch.bool)])
def test_the_kernel_of_attention_is_the_one_that_runs(dropout, mask, attention_operations):
    q = torch.zeros(1, 2, 256, 32)
    with attention_operations() as ran:
        scaled_dot_product_attention(q, q, q, mask, dropout, is_causal=mask is None)
    kernel = torch_patches.attention_kernel(q, dropout, mask)
    assert ran == [kernel.name.removesuffix("_ATTENTION").lower()]
    assert (kernel == SDPBackend.MATH) == bool(dropout)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_kernel_for_shared_keys_is_the_one_that_runs(heads, attention_operations):
    q, k = torch.zeros(1, 4, 256, 32), torch.zeros(1, heads, 256, 32)
    with attention_operations() as ran:
        scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    kernel = torch_patches.attention_kernel(q, 0.0, k=k)
    assert ran == [kernel.name.removesuffix("_ATTENTION").lower()]


def test_gradients_can_arrive_without_hooks():
    weight = torch.nn.Parameter(torch.ones(1))
    seen = []
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda _weight: seen.append("accumulated"))
    with torch_patches.without_hooks([weight]):
        weight.sum().backward()
    assert (weight.grad.item(), seen) == (1.0, [])
    weight.grad = None
    weight.sum().backward()
    assert (weight.grad.item(), seen) == (2.0, ["accumulated"])


def test_callers_are_named_without_reading_their_source(monkeypatch):
    # torch still asks for names, and still reads sources to find them.
    assert "get_method_name()" in inspect.getsource(rendezvous)
    assert "inspect.stack()" in inspect.getsource(rendezvous.get_method_name)
    monkeypatch.setattr(rendezvous, "get_method_name", rendezvous.get_method_name)  # restored
    torch_patches.name_callers_without_source()
    monkeypatch.delattr(inspect, "stack")  # what torch's own reads sources with

    def record():
        return rendezvous.get_method_name()

    def close():
        return record()

    assert close() == "close"
