"""Muon's matrices shared by ranks: who owns which, and the bits, memory, and files of one rank."""

import copy
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.muon import optimizer as muon
from lockstep.muon import owned as owned_matrices
from lockstep.muon.optimizer import Muon
from lockstep.muon.orthogonalization import flops_of
from lockstep.muon.owned import OwnedMatrices, owners_of
from lockstep.muon.placement import ReplicatedMatrices
from lockstep.ranks.ranks import lost_peers
from lockstep.strategies import placing as strategies

SHAPES = [(20, 30), (30, 20), (17, 17), (20, 30), (20, 30), (30, 20), (20, 30)]
SHORT = [(16, 40), (8, 8), (40, 16), (16, 40)]  # which no rank owns
GPT = {"architecture": "gpt", "n_layer": 2, "n_embd": 32, "bias": False}
MODERN = {"architecture": "modern", "n_layer": 2, "n_embd": 32}


def sizes_of_layers(layers, width):
    return ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)) * layers


@pytest.mark.parametrize(
    ("layers", "world_size", "excess"),
    [(12, 4, 1.0), (12, 8, 1.2), (24, 8, 1.0), (36, 16, 1.1)],
)
def test_ranks_multiply_about_equally_much(layers, world_size, excess):
    shapes = sizes_of_layers(layers, 64)
    owners = owners_of(shapes, world_size)
    loads = [0] * world_size
    for shape, owner in zip(shapes, owners, strict=True):
        loads[owner] += flops_of(shape)
    assert max(loads) <= excess * mean(loads)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(1, 40))
def test_a_rank_has_at_most_one_matrix_of_a_shape_more_than_another(shapes, world_size):
    owners = owners_of(tuple(shapes), world_size)
    assert len(owners) == len(shapes)
    for shape in set(shapes):
        counts = [0] * world_size
        for other, owner in zip(shapes, owners, strict=True):
            counts[owner] += other == shape
        assert max(counts) - min(counts) <= 1


def test_the_work_of_a_matrix_is_that_of_its_products():
    # x @ x.mT, its square, and the product with x: 2 m n k each.
    assert flops_of((3, 5)) == flops_of((5, 3)) == 5 * (2 * 3 * 3 * 5 + 2 * 3**3 + 2 * 3 * 3 * 5)


def optimizer_of(shapes, weight_decay=0.1):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    vector = torch.nn.Parameter(torch.randn(5))
    settings = {"lr": 0.02, "weight_decay": weight_decay}
    groups = [
        {"params": weights, "muon": True, **settings},
        {"params": [vector], "muon": False, **settings},
    ]
    return Muon(groups, (0.9, 0.95), 1e-8)


def parameters_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def step(optimizer, seed, skip=False):
    torch.manual_seed(seed)
    for weight in parameters_of(optimizer):
        weight.grad = torch.randn_like(weight)
    optimizer.param_groups[0]["lr"] = 0.02 / (seed + 1)
    optimizer.found_inf = torch.tensor(float(skip))
    optimizer.step()


def flat(state):
    return [
        (number, name, value.numpy().tobytes())
        for number, values in state["state"].items()
        for name, value in values.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4, 9])  # 9: more ranks than matrices
def test_updates_and_saved_states_are_those_of_one_rank(on_ranks, world_size):
    """Also of a skipped update, and of states that other numbers of ranks go on with."""

    def train(rank):
        alone = optimizer_of(SHAPES + SHORT)
        shared = optimizer_of(SHAPES + SHORT)
        shared.placement = OwnedMatrices(shared.matrices)
        for seed in range(4):
            step(alone, seed, skip=seed == 2)
            step(shared, seed, skip=seed == 2)
        kept = sum("momentum" in state for state in shared.state.values())
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (alone, shared)]
        resumed = copy.deepcopy(alone)
        resumed.placement = OwnedMatrices(resumed.matrices)
        resumed.load_state_dict(copy.deepcopy(saved[0]))  # which it would go on to change
        kept_again = sum("momentum" in state for state in resumed.state.values())
        for optimizer in (alone, shared, resumed):
            step(optimizer, 4)
        pairs = zip(*map(parameters_of, (alone, shared, resumed)), strict=True)
        is_equal = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in pairs)
        whole = rank > 0 or (
            flat(saved[0]) == flat(saved[1])
            and saved[0]["param_groups"] == saved[1]["param_groups"]
        )
        return is_equal, whole, kept, kept_again

    results = on_ranks(world_size, train)
    assert [result[:2] for result in results] == [(True, True)] * world_size, results
    assert sum(kept - len(SHORT) for _, _, kept, _ in results) == len(SHAPES)
    assert [kept for _, _, kept, _ in results] == [again for *_, again in results]


def test_matrices_without_a_gradient_stay_and_have_no_state(on_ranks):
    def train(rank):
        optimizer = optimizer_of(SHAPES)
        optimizer.placement = OwnedMatrices(optimizer.matrices)
        before = [weight.clone() for weight in optimizer.matrices]
        for weight in optimizer.matrices[::2]:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        pairs = zip(before, optimizer.matrices, strict=True)
        whole = all("momentum" in saved[number] for number in saved) or rank > 0
        return [torch.equal(*pair) for pair in pairs], [*saved], whole

    for unchanged, numbers, whole in on_ranks(2, train):
        assert unchanged == [False, True] * 3 + [False]
        assert sorted(numbers) == [0, 2, 4, 6]
        assert whole


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "model"), [(2, GPT), (4, MODERN)], ids=["gpt", "modern"])
def test_a_run_ends_as_if_each_rank_computed_all_updates(on_ranks, new_run, model, world_size):
    """With DDP, accumulation, clipping, and a loss of each step, in each precision."""

    def run_of(precision):
        run = new_run(
            precision=precision,
            model=model,
            max_steps=12,
            val_every=12,
            clip_norm=0.5,
            optim={"algorithm": "muon", "lr": 0.02, "weight_decay": 0.1},
        )
        strategy = strategies.ddp(process_group_backend="gloo")
        trainer = run.fit(strategy=strategy, devices=world_size, precision=precision)
        (optimizer,) = trainer.optimizers
        momentum = sum(
            state["momentum"].nbytes for state in optimizer.state.values() if "momentum" in state
        )
        weights = [weight.detach() for weight in run.module.model.parameters()]
        return run.val_loss, weights, momentum

    def train(_rank):
        results = []
        for precision in ("32-true", "64-true", "bf16-mixed"):
            muon.OwnedMatrices = OwnedMatrices
            shared = run_of(precision)
            muon.OwnedMatrices = lambda _matrices, *flags: ReplicatedMatrices(*flags)
            replicated = run_of(precision)
            pairs = zip(shared[1], replicated[1], strict=True)
            difference = max(float((one - other).abs().max()) for one, other in pairs)
            results.append((shared[0] - replicated[0], difference, shared[2], replicated[2]))
        return results

    results = on_ranks(world_size, train)
    for rank in results:
        assert not isinstance(rank, str), rank
        for _, difference, _, _ in rank:
            assert difference == 0, rank
        assert [loss for loss, *_ in rank] == [0] * 3
    for whole, *parts in zip(*([own for *_, own in rank] for rank in results), strict=True):
        assert set(parts) == {whole}
    for precision in range(3):
        kept = [rank[precision][2] for rank in results]
        assert sum(kept) == results[0][precision][3]
        assert max(kept) <= 1.25 * mean(kept)


def test_a_rank_that_dies_while_updates_are_gathered_is_a_lost_peer(on_ranks):
    def train(rank):
        optimizer = optimizer_of(SHAPES)
        optimizer.placement = OwnedMatrices(optimizer.matrices)
        step(optimizer, 0)
        if rank == 1:
            owned_matrices.gather_stacks = lambda *_: (_ for _ in ()).throw(ZeroDivisionError)
        try:
            step(optimizer, 1)
        except ZeroDivisionError:
            return "dies"  # the process ends, and its connections with it
        except RuntimeError as error:
            return lost_peers(error)
        return None

    assert on_ranks(2, train) == [True, "dies"]
