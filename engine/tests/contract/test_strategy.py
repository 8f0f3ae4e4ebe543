"""DDPStrategy alone: gradients are averaged over any ranks and micro-batches."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lockstep.strategies.placing import place

DOUBLE = {"precision": "64-true"}
slow = pytest.mark.slow
SPREADS = [
    (1, 4),
    (2, 1),
    (2, 3),
    pytest.param(3, 1, marks=slow),
    (3, 2),
    pytest.param(4, 1, marks=slow),
    pytest.param(4, 3, marks=slow),
]


def largest_difference(weights, others):
    pairs = zip(weights, others, strict=True)
    return max(abs(torch.tensor(a) - torch.tensor(b)).max().item() for a, b in pairs)


@pytest.fixture
def trained(foreign, on_each):
    """Return a function that returns the weights of all ranks after training."""

    def run(world_size, accumulation, kind="dict", prepare=None, make=torch.optim.Adam, **settings):
        def fit(_rank):
            module = foreign.module(kind, dropout=0, make=make)
            if prepare is not None:
                prepare(module)
            spread = {"world_size": world_size, "accumulation": accumulation}
            foreign.train(module, **spread, **DOUBLE, **settings)
            return foreign.weights(module)

        return on_each(world_size, fit)

    return run


@pytest.mark.parametrize(("world_size", "accumulation"), SPREADS)
def test_weights_are_those_of_one_rank_on_the_whole_batch(trained, world_size, accumulation):
    """Averages over ranks and micro-batches differ from the whole batch's by rounding only."""
    (whole,) = trained(1, 1)
    ranks = trained(world_size, accumulation)
    assert all(rank == other for rank, other in pairwise(ranks))
    assert largest_difference(ranks[0], whole) < 1e-12


@pytest.mark.parametrize("kind", ["tuple", pytest.param("tensor", marks=slow)])
def test_batches_may_have_any_shape(trained, kind):
    """A tuple of three tensors, and a single tensor, train as a dict does."""
    (whole,) = trained(1, 1, kind)
    ranks = trained(2, 2, kind)
    assert ranks[0] == ranks[1]
    assert largest_difference(ranks[0], whole) < 1e-12


@pytest.mark.parametrize("spread", [(1, 2), (2, 1), (2, 2), pytest.param((3, 2), marks=slow)])
def test_hooks_of_parameters_act_once_in_each_micro_batch(trained, spread):
    """A hook that doubles a gradient doubles it once, also in a process's first step."""

    def prepare(module):
        module.net[0].weight.register_hook(lambda gradient: 2 * gradient)

    settings = {"make": torch.optim.SGD}  # Adam's updates hardly depend on a gradient's scale
    (plain,) = trained(1, 1, steps=3, **settings)
    for steps in (1, 3):
        (whole,) = trained(1, 1, prepare=prepare, steps=steps, **settings)
        ranks = trained(*spread, prepare=prepare, steps=steps, **settings)
        assert largest_difference(ranks[0], whole) < 1e-12
    assert largest_difference(plain, whole) > 1e-4


@pytest.mark.parametrize("spread", [(1, 3), (2, 3), pytest.param((4, 2), marks=slow), (3, 2)])
def test_a_training_step_runs_once_for_each_real_micro_batch(foreign, on_each, spread):
    """The owner's code sees each of its batches once, in order, and no other one."""
    world_size, accumulation = spread

    class Witness(foreign.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch, batch_idx):
            self.seen.append((batch_idx, batch["x"].tolist()))
            return super().training_step(batch, batch_idx)

    def fit(rank):
        module = foreign.module(of=Witness)
        foreign.train(module, world_size=world_size, accumulation=accumulation, steps=4)
        order = iter(foreign.StepOrder(rank, world_size, accumulation))
        rows = foreign.Rows("dict").rows
        expected = [(i, rows[next(order)].tolist()) for i in range(4 * accumulation)]
        return module.seen == expected

    assert on_each(world_size, fit) == [True] * world_size


@pytest.mark.parametrize(
    "spread", [(3, 2), *(pytest.param(each, marks=slow) for each in ((2, 2), (3, 1), (4, 3)))]
)
def test_a_restart_continues_with_equal_bits(foreign, on_each, tmp_path, spread):
    """A process's first step adds in the same order as later steps of an uninterrupted one."""
    world_size, accumulation = spread
    path = tmp_path / "saved" / "third.ckpt"

    def fit(folder, **settings):
        module = foreign.module(dropout=0)
        saves = ModelCheckpoint(folder, path.stem, every_n_train_steps=3)
        spread = {"world_size": world_size, "accumulation": accumulation}
        foreign.train(module, saves, steps=5, **spread, **settings)
        return foreign.digest(module)

    def whole(_rank):
        return fit(path.parent)

    def rest(_rank):
        return fit(tmp_path / "rest", ckpt_path=path, start=3)

    uninterrupted = on_each(world_size, whole)
    assert path.exists()
    assert on_each(world_size, rest) == uninterrupted


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
def test_an_optimizer_that_shares_its_work_learns_of_the_ranks_and_of_compilation(foreign):
    """The module only returns it; what `place` has compiled decides how it computes."""
    told = []

    class Sharing(torch.optim.SGD):
        def share_work(self, strategy, compiled):
            told.append((strategy, compiled))

    class Placed(foreign.Module):
        compiled = False

        def configure_model(self):
            place(self.net, self.trainer.strategy, compiled=self.compiled)

    for compiled in (False, True):
        module = foreign.module(make=Sharing, of=Placed)
        module.compiled = compiled
        strategy = foreign.strategy(1, exact=False)
        foreign.train(module, steps=0, strategy=strategy)
        assert told.pop() == (strategy, compiled)


def test_a_resumed_optimizer_keeps_no_number_in_the_file(foreign, tmp_path):
    """Its state is a copy, one tensor after the other, of what was read."""
    module = foreign.module()
    saves = ModelCheckpoint(tmp_path, "second", every_n_train_steps=2)
    foreign.train(module, saves, steps=2)
    trainer = foreign.train(foreign.module(), steps=1)
    saved = torch.load(tmp_path / "second.ckpt", weights_only=True)["optimizer_states"][0]
    (optimizer,) = trainer.optimizers
    optimizer.load_state_dict(saved)
    states = optimizer.state_dict()["state"]
    assert states.keys() == saved["state"].keys() != set()
    for number, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(states[number][name], value)
            assert states[number][name].data_ptr() != value.data_ptr()
