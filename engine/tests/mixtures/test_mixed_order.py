"""The order of a mixture is a function of the position alone, and of exact shares."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UserError
from lockstep.loading.order import RankOrder, Shuffled
from lockstep.mixtures.mixed_order import MixedOrder, exact, phases, seed_of

SIZES = {"a": 1, "b": 7, "c": 130, "d": 5000}
T, B = 16, 4


def order_of(weights, sizes=SIZES, seed=1, **changes):
    settings = {"epochs": {}, "schedule": [], **changes}
    return MixedOrder(sizes, phases(weights, sizes=sizes, planned=10_000, **settings), seed)


@pytest.mark.slow
@given(
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4), st.integers(0, 10**9), st.integers(0, 9)
)
def test_each_source_goes_through_its_own_epochs(weights, start, seed):
    order = order_of(dict(zip(SIZES, weights, strict=True)), seed=seed)
    positions = np.arange(start, start + 600)
    actual = order(positions)
    sources, numbers = order.turns.at(positions)
    first = 0
    for place, (name, size) in enumerate(SIZES.items()):
        of_source = sources == place
        expected = first + Shuffled(size, seed_of(seed, name))(numbers[of_source])
        assert actual[of_source].tolist() == expected.tolist()
        first += size


def test_an_epoch_of_a_source_has_each_window_once_and_the_next_another_order():
    order = order_of({"c": 1.0, "d": 2.0}, {"c": 130, "d": 5000})
    numbers = order(np.arange(3 * 390))
    epochs = numbers[numbers < 130].reshape(3, 130)
    assert all(sorted(epoch) == [*range(130)] for epoch in epochs.tolist())
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 3


def test_another_source_does_not_change_the_order_within_one():
    one = order_of({"c": 1.0, "d": 1.0}, {"c": 130, "d": 5000})(np.arange(500))
    other = order_of({"b": 1.0, "c": 1.0}, {"b": 400, "c": 130})(np.arange(500))
    assert one[one < 130].tolist() == (other[other >= 400] - 400).tolist()


@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_a_step_has_the_same_windows_on_any_number_of_ranks(world):
    order = order_of(dict.fromkeys(SIZES, 1.0), seed=7)
    per_rank = 12 // world
    streams = [iter(RankOrder(order, 2, rank, world, per_rank // 2)) for rank in range(world)]
    steps = [
        np.concatenate([next(stream).samples for stream in streams for _ in range(per_rank // 2)])
        for _ in range(50)
    ]
    assert np.array_equal(np.concatenate(steps), order(np.arange(600)))


def test_batches_are_of_the_mixture_and_a_resume_continues_at_the_sample(corpora, module_of):
    data = corpora(weights={"code": 0.5, "poems": 0.2, "prose": 0.3})
    batches = iter(module_of(data).train_dataloader())
    all_of_them = [next(batches)[0].numpy() for _ in range(25)]
    letters = {"code": b"xyz", "poems": b"aeiou", "prose": b"klmnop"}
    taken = dict.fromkeys(letters, 0)
    for window in np.concatenate(all_of_them):
        (name,) = [name for name in letters if {*window.tolist()} <= {*letters[name], 32}]
        taken[name] += 1
    assert taken == {"code": 50, "poems": 20, "prose": 30}
    resumed = iter(module_of(data, samples=10 * B).train_dataloader())
    for expected in all_of_them[10:]:
        assert np.array_equal(next(resumed)[0].numpy(), expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_validation_batch_is_of_one_source_and_each_window_comes_once(
    world, corpora, module_of
):
    modules = [module_of(corpora(), rank, world) for rank in range(world)]
    loaders = [module.val_dataloader().loaders for module in modules]
    windows = modules[0].windows["val"]
    first = 0
    for size, of_ranks in zip(windows.counts.values(), zip(*loaders, strict=True), strict=True):
        batches = [stored.ids[: stored.real] for loader in of_ranks for stored in loader]
        seen = sorted(torch.cat(batches).tolist())
        assert seen == sorted(windows[np.arange(first, first + size)].tolist())
        assert len({len(loader) for loader in of_ranks}) == 1
        first += size
    assert first == sum(modules[0].validated.values())
    assert len([*modules[0].val_dataloader()]) == sum(map(len, loaders[0]))


def test_val_tokens_are_divided_equally_and_each_source_has_a_window(corpora, module_of):
    module = module_of(corpora(), val_tokens=30 * T)
    assert module.validated == {"code": 10, "poems": 10, "prose": 10}
    assert sum(module_of(corpora(), val_tokens=1).validated.values()) == 3
    assert module_of(corpora(), val_tokens=300 * T).validated["poems"] < 100


def test_a_source_without_a_whole_window_is_named(corpora, module_of, tmp_path):
    (tmp_path / "poems").write_text("a e i o u" * 5)
    with pytest.raises(
        ValueError, match=r"model.block_size=16 needs 17 .* the poems/val split has"
    ):
        module_of(corpora())


def test_other_sources_have_the_usual_order(corpora, single):
    assert single("code").order({"": 100}, 1000, T, 1) == Shuffled(100, 1)
    order = corpora("code").order({"code": 100}, 1000, T, 1)
    assert isinstance(order, MixedOrder)
    assert sorted(order(np.arange(100)).tolist()) == [*range(100)]


def test_targets_follow_tokens(corpora, module_of):
    module = module_of(corpora())
    batch = next(iter(module.train_dataloader()))
    tokens, targets = module.on_after_batch_transfer(batch, 0)
    assert tokens[:, 1:].tolist() == targets[:, :-1].tolist()


WINDOWS = {"code": 1000, "prose": 100}


def phases_of(data, sizes=WINDOWS, planned=1000):
    return phases(data.weights, data.epochs, data.schedule, sizes, planned)


def shares(data, planned=1000):
    return [(phase.start, [*map(str, phase.shares)]) for phase in phases_of(data, planned=planned)]


def test_weights_are_relative(corpora):
    data = corpora("code prose", weights={"code": 3.0, "prose": 1.0})
    assert shares(data) == [(0, ["3/4", "1/4"])]


def test_a_number_is_what_was_typed():
    assert exact(0.7) == Fraction(7, 10)
    assert exact(1e-3) == Fraction(1, 1000)


def test_epochs_come_before_weights_which_share_the_rest(corpora):
    data = corpora("code prose", weights={"code": 5.0}, epochs={"prose": 2.0})
    assert shares(data) == [(0, ["4/5", "1/5"])]


def test_epochs_of_all_sources_are_relative(corpora):
    data = corpora("code prose", epochs={"prose": 10.0, "code": 1.0})
    assert shares(data, planned=77) == [(0, ["1/2", "1/2"])]


def test_a_phase_divides_what_epochs_leave(corpora):
    later = [{"from": 0.75, "weights": {"poems": 1}}]
    data = corpora(weights={"code": 1.0}, epochs={"prose": 2.0}, schedule=later)
    sizes = {"code": 1000, "poems": 50, "prose": 100}
    first, second = phases_of(data, sizes)
    assert (first.start, *map(float, first.shares)) == (0, 0.8, 0, 0.2)
    assert (second.start, *map(float, second.shares)) == (750, 0, 0.8, 0.2)


def test_epochs_longer_than_the_run_are_rejected(corpora):
    data = corpora("code prose", weights={"code": 1.0}, epochs={"prose": 10.0})
    with pytest.raises(UserError, match="takes 1,000 windows, and the run has 1,000"):
        phases_of(data)
