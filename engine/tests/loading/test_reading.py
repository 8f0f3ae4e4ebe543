"""A sample's random numbers depend on the seed and on its position, not on who reads it."""

# ruff: noqa: NPY002  (NumPy's global generator is what datasets use)

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lockstep.loading.order import Places
from lockstep.loading.reading import BatchReader
from lockstep.patches import numpy as numpy_patches

DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "numpy": lambda: np.random.rand(3).tolist(),
    "python": lambda: [random.random() for _ in range(3)],
}


class Noisy:
    """Samples with random numbers, from some number on."""

    def __init__(self, draw, first=0):
        self.draw, self.first, self.reads = draw, first, []

    def __len__(self):
        return 100

    def __getitem__(self, number):
        self.reads.append(number)
        return torch.tensor([number, *(self.draw() if number >= self.first else [0.0] * 3)])


class Batched(Noisy):
    """The same, as many at once as are wanted."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def places(*positions, samples=None):
    return Places(positions[0], np.array(positions if samples is None else samples))


def reader_of(dataset, seed=7, collate=default_collate, **changes):
    return BatchReader(dataset, seed, collate, **changes)


@pytest.fixture(params=DRAWS)
def draw(request):
    return DRAWS[request.param]


@pytest.mark.parametrize("kind", [Noisy, Batched])
def test_random_numbers_are_those_of_the_position(kind, draw):
    together = reader_of(kind(draw)).__getitems__(places(3, 4, 5, 6))
    alone = [reader_of(kind(draw)).__getitems__(places(at)) for at in (3, 4, 5, 6)]
    assert torch.equal(together, torch.cat(alone))
    assert len({*together[:, 1].tolist()}) == 4
    other_epoch = reader_of(kind(draw)).__getitems__(places(103, samples=[3]))
    assert other_epoch[0, 0] == 3
    assert other_epoch[0, 1] != together[0, 1]
    assert reader_of(kind(draw), seed=8).__getitems__(places(3))[0, 1] != together[0, 1]


def test_a_dataset_that_draws_late_gets_the_numbers_of_one_that_always_did(draw):
    late = reader_of(Noisy(draw, first=6))
    batches = [late.__getitems__(places(*range(at, at + 4))) for at in (0, 4, 8)]
    always = reader_of(Noisy(draw)).__getitems__(places(*range(12)))
    assert torch.equal(torch.cat(batches)[6:], always[6:])
    # Only the batch in which the first number was drawn is read again.
    reads = late.dataset.reads
    assert {number for number in reads if reads.count(number) > 1} == {4, 5, 6, 7}


def test_a_dataset_that_draws_nothing_is_read_once():
    reader = reader_of(Noisy(None, first=100))
    for at in range(0, 40, 4):
        random.random()  # training may draw between reads
        torch.rand(1)
        np.random.rand()
        reader.__getitems__(places(*range(at, at + 4)))
    assert not reader.drawn
    assert reader.dataset.reads == [*range(40)]


def test_a_read_leaves_the_generators_of_training_alone(draw):
    reader = reader_of(Noisy(draw))
    reader.__getitems__(places(0, 1))  # shows that it draws
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    expected = [[draw() for draw in DRAWS.values()] for _ in range(2)]
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    actual = []
    for at in (0, 2):
        reader.__getitems__(places(at, at + 1))
        actual.append([draw() for draw in DRAWS.values()])
    assert actual == expected


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_read_the_same(workers, draw):
    batches = [places(*range(at, at + 4)) for at in range(0, 24, 4)]
    reader = reader_of(Noisy(draw, first=9))
    here = [reader.__getitems__(batch) for batch in batches]
    there = DataLoader(
        reader_of(Noisy(draw, first=9)),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=torch.clone,
    )
    assert torch.equal(torch.stack([*there]), torch.stack(here))


def test_a_group_of_batches_is_read_at_once_and_padding_is_marked():
    dataset = Batched(None, first=100)
    marked = reader_of(dataset, pad=lambda batch, real: (batch, real))
    batches = [*marked.read_group([places(5, 6, 7), places(8, -1, -1)])]
    assert batches[0][:, 0].tolist() == [5, 6, 7]
    batch, real = batches[1]
    assert (batch[:, 0].tolist(), real) == ([8, 0, 0], 1)


def test_numpy_s_state_changes_with_each_draw_and_only_then():
    state = numpy_patches.random_state()
    assert numpy_patches.random_state() == state
    for draw in (np.random.rand, np.random.randn, lambda: np.random.randint(2**31)):
        draw()
        assert numpy_patches.random_state() != state
        state = numpy_patches.random_state()
    assert state[-4:] == np.random.get_state()[2].to_bytes(4, "little")
