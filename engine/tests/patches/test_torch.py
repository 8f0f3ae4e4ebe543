"""What torch doesn't offer in public.

A test of changed behavior fails once torch no longer needs the change.
A test of a private name fails once torch has something else under it.
"""

import inspect

import torch
import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous

from lockstep.patches import torch as torch_patches


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
