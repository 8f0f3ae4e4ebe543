"""What is sent to an Apple GPU, and what is computed there, with tensors that simulate one.

They are on the host, and reject what such a GPU rejects: float64, and uint16 and wider ones.
"""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.windows import Stored
from lockstep_gpt.errors import RunError
from lockstep_gpt.model import functional
from lockstep_gpt.training import apple_gpu as training
from lockstep_gpt.training.seeds import leaf_seed
from lockstep_gpt.training.token_loss import TokenLoss

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


def test_the_validation_loss_is_summed_on_the_host_and_is_that_of_a_cpu():
    there, here = TokenLoss(), TokenLoss()
    for loss, ignored in [(2.5, 0), (0.1, 3), (7.0, 1)]:
        targets = torch.tensor([[5, 6, 7, 8]])
        targets[0, :ignored] = functional.IGNORE
        here.update(torch.tensor(loss), targets)
        there.update(on_apple(loss), targets.as_subclass(OnApple))
    assert there.compute().item() == here.compute().item()
    assert there.compute().dtype == torch.float64


def test_logged_losses_are_averaged_on_the_host(new_run):
    losses, sums = new_run().module.losses, (3.0, 4.5)
    losses.sums = {leaf: on_apple(total) for leaf, total in enumerate(sums)}
    losses.steps = 3
    means = losses.take()
    assert (type(means), means.dtype) == (torch.Tensor, torch.float64)
    assert means.flatten().tolist() == [each / 3 for each in sums]


@pytest.mark.parametrize("broken", [False, True])
def test_non_finite_updates_are_not_applied_despite_fused_kernels(new_run, broken, monkeypatch):
    run, seen = new_run(max_steps=2, guard={"max_skipped": 9}), []
    monkeypatch.setattr(torch.mps, "manual_seed", seen.append)
    if broken:
        run.module.model.head.register_hook(lambda grad: grad * math.inf)
    before = [each.detach().clone() for each in run.module.parameters()]
    with pytest.raises(RunError, match=r"^step 1: .+ those of step 0") if broken else nullcontext():
        run.fit(training.AppleGPU())
    same = [torch.equal(*pair) for pair in zip(before, run.module.parameters(), strict=True)]
    assert all(same) == broken
    leaves = [leaf_seed(run.config.seed, step, leaf) for step in (0, 1) for leaf in (0, 1)]
    assert seen == leaves[: 2 if broken else 4]


@pytest.mark.parametrize("stored", ["uint8", "uint16", "uint32"])
def test_tokens_are_copied_as_int32(stored):
    windows = torch.from_numpy(np.ones((2, 9), dtype=stored))
    transfer = TokenDataModule.transfer_batch_to_device
    with FakeTensorMode(allow_non_fake_inputs=True):
        sent = transfer(None, Stored(windows, 2), DEVICE)
    assert (sent.ids.dtype, sent.ids.device, sent.real) == (torch.int32, DEVICE, 2)


def test_the_receipt_names_its_kernels():
    before = torch.get_float32_matmul_precision()
    try:
        assert functional.choose_matrix_products("mps") == "Metal"
    finally:
        torch.set_float32_matmul_precision(before)
