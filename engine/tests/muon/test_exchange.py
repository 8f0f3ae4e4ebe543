"""Matrices whose rows are on several ranks: each has one owner, and results equal those of one."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.muon.exchange import (
    MatrixExchange,
    plan_rounds,
    rows_of_ranks,
)

SHAPES = [(16, 16), (48, 16), (7, 33), (64, 16), (16, 16), (1, 40), (33, 7), (3, 3), (16, 16)]
costs = st.lists(st.integers(1, 1000), max_size=40)


def matrices(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mixed(whole):
    """Mix rows and columns, so that any element at a wrong place changes the result."""
    return (whole @ whole.mT) @ whole / whole.norm(dim=(1, 2), keepdim=True)


def shards_of(rank, world_size, wholes):
    """Return views of the rows of one rank; the last ranks may have none."""
    rows = [rows_of_ranks(len(whole), world_size) for whole in wholes]
    return [
        whole[sum(counts[:rank]) : sum(counts[: rank + 1])]
        for whole, counts in zip(wholes, rows, strict=True)
    ]


def exchanged(rank, world_size, dtype):
    """Return whether this rank's results are the right bits, and how many it computed at once."""
    wholes = matrices(dtype)
    shards = shards_of(rank, world_size, wholes)
    sizes = [rows * columns for rows, columns in SHAPES]
    exchange = MatrixExchange(SHAPES, sizes, dist.group.WORLD)
    shapes_computed = []

    def compute(number, whole):
        assert tuple(whole.shape) == (1, *SHAPES[number])
        shapes_computed.append(tuple(whole.shape))
        return mixed(whole)

    results = {}
    for _ in range(2):  # the same exchange in each step
        for numbers, parts in exchange.apply(lambda chosen: [shards[n] for n in chosen], compute):
            results |= zip(numbers, parts, strict=True)
    expected = shards_of(rank, world_size, [mixed(whole[None])[0] for whole in wholes])
    equal = [torch.equal(results[number], part) for number, part in enumerate(expected)]
    return equal, shapes_computed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_on_shards_have_the_bits_of_whole_matrices(on_ranks, world_size, dtype):
    found = on_ranks(world_size, lambda rank: exchanged(rank, world_size, dtype))
    assert [equal for equal, _ in found] == [[True] * len(SHAPES)] * world_size
    computed = [shape for _, shapes in found for shape in shapes]
    assert sorted(computed) == sorted((1, *shape) for shape in SHAPES * 2)  # each by one rank
    most = -(-len(SHAPES) // world_size)
    assert all(len(shapes) <= 2 * most for _, shapes in found)


def nothing(_rank):
    exchange = MatrixExchange([], [], dist.group.WORLD)
    return [*exchange.apply(lambda _: [], mixed)]


def test_without_matrices_nothing_is_exchanged(on_ranks):
    assert on_ranks(2, nothing) == [[], []]


@given(costs, st.integers(1, 9))
def test_each_matrix_has_one_owner_in_the_fewest_rounds(costs, world_size):
    rounds = plan_rounds(costs, world_size)
    owned = sorted(matrix for each in rounds for matrix in each.values())
    assert owned == [*range(len(costs))]
    assert len(rounds) == -(-len(costs) // world_size)
    assert all(set(each) <= {*range(world_size)} for each in rounds)


@given(costs, st.integers(1, 9))
def test_no_rank_has_more_to_do_than_another_by_more_than_one_matrix(costs, world_size):
    loads = [0] * world_size
    for each in plan_rounds(costs, world_size):
        for rank, matrix in each.items():
            loads[rank] += costs[matrix]
    assert max(loads) - min(loads) <= max(costs, default=0)


@given(st.integers(0, 100), st.integers(1, 12))
def test_rows_are_cut_as_torch_cuts_them(rows, world_size):
    chunks = [len(chunk) for chunk in torch.empty(rows, 1).chunk(world_size)] if rows else []
    expected = chunks + [0] * (world_size - len(chunks))
    assert rows_of_ranks(rows, world_size) == expected
