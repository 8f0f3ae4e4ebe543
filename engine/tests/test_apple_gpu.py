"""What is sent to an Apple GPU, and what is computed there, with tensors that simulate one.

They are on the host, and reject what such a GPU rejects: float64, and uint16 and wider ones.
"""

import numpy as np
import pytest
import torch
from lockstep_gpt.data import Tokens
from torch._subclasses import FakeTensorMode

from lockstep.callbacks.seeds import seed_device
from lockstep.metrics.mean import Mean
from lockstep.tokens.windows import Stored

ABSENT = {torch.float64, torch.uint16, torch.uint32, torch.uint64, torch.complex128}
DEVICE = torch.device("mps", 0)
LEAVES = (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy)


class OnApple(torch.Tensor):
    """A tensor on the host with the device and the limits of an Apple GPU."""

    device = property(lambda _: DEVICE)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func in LEAVES:
            return found.as_subclass(torch.Tensor) if isinstance(found, torch.Tensor) else found
        if isinstance(found, OnApple) and found.dtype in ABSENT:
            raise TypeError(f"Cannot convert a MPS Tensor to {found.dtype}")
        return found


def on_apple(value, **settings):
    return torch.tensor(value, **settings).as_subclass(OnApple)


def test_the_stand_in_rejects_the_same_settings_as_the_gpu():
    with pytest.raises(TypeError, match="float64"):
        on_apple(1.0).double()
    assert on_apple(1.0).cpu().double().dtype == torch.float64


def test_means_are_summed_on_the_host_and_are_those_of_a_cpu():
    there, here = Mean("loss"), Mean("loss")
    for loss, counted in [(2.5, 4), (0.1, 1), (7.0, 3)]:
        here.update(torch.tensor(loss), torch.tensor(counted))
        there.update(on_apple(loss), on_apple(counted))
    assert there.compute().item() == here.compute().item()
    assert there.compute().dtype == torch.float64


def test_its_random_numbers_are_seeded(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.mps, "manual_seed", seen.append)
    seed_device(7, DEVICE)
    assert (seen, torch.initial_seed()) == ([7], 7)


@pytest.mark.parametrize("stored", ["uint8", "uint16", "uint32"])
def test_tokens_are_copied_as_int32(stored):
    windows = torch.from_numpy(np.ones((2, 9), dtype=stored))
    transfer = Tokens.transfer_batch_to_device
    with FakeTensorMode(allow_non_fake_inputs=True):
        sent = transfer(None, Stored(windows, 2), DEVICE)
    assert (sent.ids.dtype, sent.ids.device, sent.real) == (torch.int32, DEVICE, 2)
