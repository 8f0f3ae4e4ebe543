"""ClipAndSkip alone, with torch's own optimizers, which it doesn't know."""

import copy

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.errors import RunError, UserError

slow = pytest.mark.slow
OPTIMIZERS = {
    "Adam": (torch.optim.Adam, {}),
    "Adam fused": (torch.optim.Adam, {"fused": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "SGD fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}
BROKEN = 3  # the step with a gradient that is not a number


def state_of(module, optimizer):
    """Return copies of all weights, and of all that the optimizer keeps of them."""
    state = {"weights": module.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return copy.deepcopy(state)


def are_equal(one, other):
    """Return whether two states have equal bits; a NaN equals nothing."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    return one == other


class States(lightning.Callback):
    """Keeps the states after each step."""

    def __init__(self):
        self.after = {}

    def on_train_start(self, trainer, pl_module):
        self.after[trainer.global_step] = state_of(pl_module, trainer.optimizers[0])

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after[trainer.global_step] = state_of(pl_module, trainer.optimizers[0])


@pytest.fixture
def broken_module(foreign):
    """Return a function that makes a module whose loss is NaN on the last rank in some steps."""

    class Broken(foreign.Module):
        steps = (BROKEN,)
        rank = 0

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if self.global_step + 1 in self.steps and self.global_rank == self.rank:
                loss = loss * float("nan")
            return loss

    def make(name, rank=0, steps=(BROKEN,)):
        optimizer, settings = OPTIMIZERS[name]
        module = foreign.module(of=Broken, make=optimizer, **settings)
        module.rank, module.steps = rank, steps
        return module

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_weights_and_moments(foreign, broken_module, name):
    """Every optimizer finds its weights, moments, and counts as they were; then it goes on."""
    states, module = States(), broken_module(name)
    foreign.train(module, ClipAndSkip(1.0, max_skipped=1), states, steps=6, accumulation=2)
    after = states.after
    assert are_equal(after[BROKEN], after[BROKEN - 1])
    for step in (1, 2, 4, 5, 6):
        assert not are_equal(after[step]["weights"], after[step - 1]["weights"])
    assert all(weight.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD fused"])
def test_under_a_loss_scaler_gradients_are_unscaled_before_they_are_clipped(foreign, name):
    """The scale of the loss, 65,536, changes neither the norm nor the weights beyond rounding."""
    make, settings = OPTIMIZERS[name]
    results = []
    for plugins in ([], [MixedPrecision("16-mixed", "cpu")]):
        clip = ClipAndSkip(0.01)
        module = foreign.module(dropout=0, make=make, **settings)
        foreign.train(module, clip, steps=4, plugins=plugins)
        results.append([clip.norm, *module.parameters()])
    for scaled, plain in zip(*results, strict=True):
        torch.testing.assert_close(scaled, plain, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("world_size", "exact", "name"),
    [
        (2, False, "RAdam"),
        pytest.param(3, False, "SGD fused", marks=slow),
        pytest.param(2, True, "Adam fused", marks=slow),
    ],
)
def test_all_ranks_skip_the_step_that_one_of_them_breaks(
    foreign, on_each, broken_module, world_size, exact, name
):
    """A NaN on one rank leaves the weights of all, which stay equal."""

    def fit(_rank):
        states, module = States(), broken_module(name, rank=1)
        callbacks = [ClipAndSkip(max_skipped=1), states]
        spread = {"world_size": world_size, "accumulation": 2, "exact": exact}
        foreign.train(module, *callbacks, steps=5, **spread)
        return are_equal(states.after[BROKEN], states.after[BROKEN - 1]), foreign.digest(module)

    results = on_each(world_size, fit)
    assert results == [(True, results[0][1])] * world_size


@pytest.mark.parametrize("name", ["RAdam", "Adam fused"])
@pytest.mark.parametrize("allowed", [0, 1])
def test_a_step_beyond_those_allowed_ends_the_run_by_name(foreign, broken_module, name, allowed):
    """The error names the step, and the weights are those before it."""
    states = States()
    module = broken_module(name, steps=(2, 4, 5))
    broken = [2, 4][allowed]
    with pytest.raises(RunError, match=rf"^step {broken}: the gradient is not finite, and "):
        foreign.train(module, ClipAndSkip(max_skipped=allowed), states)
    assert [*states.after] == [*range(broken)]
    assert are_equal(state_of(module, module.optimizers().optimizer), states.after[broken - 1])


class Norms(lightning.Callback):
    """Notes the norm before clipping by torch's own function, and the clipped gradients."""

    def __init__(self, clip):
        self.clip = clip
        self.expected, self.found = [], []

    def on_before_optimizer_step(self, _trainer, pl_module, _optimizer):
        weights = [torch.nn.Parameter(weight) for weight in pl_module.parameters()]
        for weight, original in zip(weights, pl_module.parameters(), strict=True):
            weight.grad = original.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(weights, self.clip.max_norm)
        self.expected.append((norm.item(), [weight.grad.tolist() for weight in weights]))

    def on_train_batch_end(self, _trainer, pl_module, *_):
        gradients = [weight.grad.tolist() for weight in pl_module.parameters()]
        self.found.append((self.clip.norm.item(), gradients))


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
def test_gradients_are_clipped_as_torch_does(foreign, kind, max_norm):
    """Norm and clipped gradients have the bits of `torch.nn.utils.clip_grad_norm_`."""
    clip = ClipAndSkip(max_norm)
    norms = Norms(clip)
    foreign.train(foreign.module(kind), norms, clip)  # the first one sees gradients unclipped
    assert norms.found == norms.expected
    is_clipped = [norm > max_norm for norm, _ in norms.found]
    assert all(is_clipped) if max_norm < 1 else not any(is_clipped)


def test_the_count_continues_after_a_resume(foreign, broken_module, tmp_path):
    """Lightning's checkpoint has the number of skipped steps, of the whole run."""
    steps, path = (2, 6), tmp_path / "fourth.ckpt"

    def saves(folder):
        return ModelCheckpoint(tmp_path / folder, path.stem, every_n_train_steps=4)

    foreign.train(
        broken_module("NAdam", steps=steps), ClipAndSkip(max_skipped=1), saves(""), steps=4
    )
    module, clip = broken_module("NAdam", steps=steps), ClipAndSkip(max_skipped=1)
    with pytest.raises(RunError, match=r"^step 6: .* those of step 5;"):
        foreign.train(module, clip, saves("rest"), ckpt_path=path, start=4)
    assert int(clip.skipped) == 2


def test_several_groups_and_frozen_weights_are_fine(foreign, broken_module):
    """Weights of other groups are skipped too; those without an optimizer don't count."""
    clip = ClipAndSkip(0.05, max_skipped=1)
    states, module = States(), broken_module("Adam")
    first, last = module.net[0], module.net[3]
    module.make = lambda _weights: torch.optim.Adam(
        [{"params": first.parameters(), "lr": 0.1}, {"params": [last.weight]}], lr=1e-3
    )
    last.bias.requires_grad = False
    foreign.train(module, states, clip, steps=5)
    assert are_equal(states.after[BROKEN], states.after[BROKEN - 1])
    assert not are_equal(states.after[BROKEN], states.after[BROKEN + 1])
    assert int(clip.skipped) == 1


class Held(lightning.Callback):
    """Counts the gradients that are there when a forward pass begins."""

    counts = ()

    def on_train_batch_start(self, trainer, pl_module, *_):
        held = sum(weight.grad is not None for weight in pl_module.parameters())
        self.counts = (*self.counts, held)


@pytest.mark.parametrize(("accumulation", "counts"), [(1, (0, 0, 0)), (2, (0, 4, 0, 4, 0, 4))])
def test_an_update_frees_the_gradients(foreign, accumulation, counts):
    """No forward pass of the next step needs memory for them."""
    held = Held()
    settings = {"accumulation": accumulation, "steps": 3}
    foreign.train(foreign.module(), held, ClipAndSkip(1.0), **settings)
    assert held.counts == counts


def test_a_trainer_that_clips_too_is_refused(foreign):
    """Two limits would clip twice; without one here, the Trainer's is the only one."""
    line = r"^trainer.gradient_clip_val=0.5 is a second limit next to clip_norm; set one of them"
    with pytest.raises(UserError, match=line):
        foreign.train(foreign.module(), ClipAndSkip(1.0), gradient_clip_val=0.5)
    foreign.train(foreign.module(), ClipAndSkip(), gradient_clip_val=0.5)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"max_norm": 0}, "clip_norm=0 must be above 0"),
        ({"max_skipped": -1}, "max_skipped=-1 must be at least 0"),
    ],
)
def test_wrong_limits_are_refused_in_one_line(wrong, line):
    """The value and the rule."""
    with pytest.raises(UserError, match=f"^{line}$"):
        ClipAndSkip(**wrong)
