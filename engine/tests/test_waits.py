"""How often the host waits for the device."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lockstep
from lockstep.callbacks import clipping
from lockstep.metrics.callback import Metrics
from lockstep.strategies.exact_sums import SingleDeviceStrategy


class Waits(TorchDispatchMode):
    """Counts the operations inside it for which the host would wait for the device.

    Args:
        host: tensors that would be on the host.
    """

    def __init__(self, host):
        super().__init__()
        self.host = {tensor.data_ptr() for tensor in host}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        reads = name == "_local_scalar_dense" and args[0].data_ptr() not in self.host
        self.count += reads or name == "nonzero"
        return func(*args, **(kwargs or {}))


def test_reads_of_a_tensor_are_counted():
    tensor, other = torch.ones(3), torch.ones(1)
    with Waits([other]) as waits:
        for ask in (tensor.sum().item, lambda: bool(tensor[0] > 0), tensor.nonzero, tensor.relu):
            ask()
        other.item()
    assert waits.count == 3


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_no_step_between_logged_ones_waits_for_the_device(composed, monkeypatch, algorithm):
    monkeypatch.setattr(clipping, "is_asynchronous", lambda _device: True)  # as a GPU
    config = composed("experiment=smoke", "precision=bf16-mixed", f"optim={algorithm}")
    batch = lockstep.build(config.batch).spread_over(1)
    schedule = lockstep.build(config.schedule, steps=100, peak=1e-3)
    module = lockstep.build(config.module, schedule=schedule, vocab_size=256)
    optimizer = module.configure_optimizers()["optimizer"]
    metrics = Metrics(batch, 10, config.model.block_size)
    clip = clipping.ClipAndSkip(1.0)
    trainer = SimpleNamespace(
        precision_plugin=SimpleNamespace(),
        strategy=SingleDeviceStrategy(),
        max_steps=100,
        global_step=0,
        optimizers=[optimizer],
        lr_scheduler_configs=[],
        callbacks=[metrics, clip],
    )
    metrics._times = [0.0]
    clip.on_train_start(trainer, module)
    tokens = torch.zeros(2, config.model.block_size, dtype=torch.int64)

    def step(number):
        for _ in range(2):
            module.training_step((tokens, tokens), 0).backward()
        for callback in trainer.callbacks:
            callback.on_before_optimizer_step(trainer, module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        metrics.on_step_end(trainer, module, number)
        clip.on_step_end(trainer, module, number)

    step(1)
    states = [optimizer.state[weight] for weight in module.parameters()]
    counts = [state["step"] for state in states if "momentum" in state]  # Muon counts on the host
    with Waits(counts) as waits:
        for number in (2, 3):
            step(number)
        assert waits.count == 0
        clip.in_row(3)
    assert waits.count == 2
