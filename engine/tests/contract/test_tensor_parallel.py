"""FSDP2 with tensor ranks alone: a foreign module gives a plan, with torch's own optimizers."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.checkpoints.io import AtomicCheckpointIO
from lockstep.strategies.placing import fsdp2, place
from lockstep.strategies.sharded_states import gathered

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(x + self.down(self.up(x).tanh()))

    def tensor_plan(self, ranks):
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}


@pytest.fixture
def trained(foreign, on_each, tmp_path):
    """Return each rank's norms of gradients and, of the first, the weights, after training."""

    class Planned(foreign.Module):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            self.net = Net()

        def configure_model(self):
            place(self.net, self.trainer.strategy)

    class Norms(ClipAndSkip):
        def on_before_optimizer_step(self, *arguments):
            super().on_before_optimizer_step(*arguments)
            self.seen = [*getattr(self, "seen", ()), float(self.norm)]

    def run(world_size, optimizer, steps=8, start=0, ckpt_path=None, save=None):
        make, settings = OPTIMIZERS[optimizer]

        def fit(rank):
            norms = Norms(max_norm=0.2)
            module = foreign.module(of=Planned, make=make, **settings)
            groups = max(1, world_size // 2)
            order = foreign.StepOrder(rank // 2, groups, 2, start)
            trainer = foreign.train(
                module,
                norms,
                world_size=world_size,
                accumulation=2,
                steps=steps,
                strategy=fsdp2(process_group_backend="gloo", tensor_parallel=2)
                if world_size > 1
                else None,
                ckpt_path=ckpt_path,
                loaders=(DataLoader(foreign.Rows("dict"), batch_sampler=order), None),
                plugins=[AtomicCheckpointIO()],
            )
            if save is not None:
                trainer.save_checkpoint(tmp_path / save)
            weights = gathered(dict(module.state_dict()))
            return norms.seen, [each.tolist() for each in weights.values()] if rank == 0 else None

        return on_each(world_size, fit)

    return run


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_norms_and_weights_are_those_of_one_rank(trained, world_size, optimizer):
    ((norms, weights),) = trained(1, optimizer)
    ranks = trained(world_size, optimizer)
    assert max(norms) > 0.2  # clipped
    assert all(each == ranks[0][0] for each, _ in ranks)
    close(ranks[0][0], norms)
    close(ranks[0][1], weights)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 4), (4, 2)])
def test_checkpoints_are_those_of_one_rank(trained, tmp_path, first, then):
    ((_, weights),) = trained(1, "Adam", steps=6, save="one.ckpt")
    trained(first, "Adam", steps=3, save="some.ckpt")
    ranks = trained(then, "Adam", steps=6, start=3, ckpt_path=tmp_path / "some.ckpt", save="c.ckpt")
    close(ranks[0][1], weights)
    ours, one = (torch.load(tmp_path / name) for name in ("c.ckpt", "one.ckpt"))
    assert ours["state_dict"].keys() == one["state_dict"].keys()
    for number, state in one["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            close([ours["optimizer_states"][0]["state"][number][name].tolist()], [value.tolist()])
