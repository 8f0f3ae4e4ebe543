"""A recording has what a step was computed from, whatever its batches look like."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lockstep.testing.recording import probe, random_states, samples_of

ROWS = torch.arange(12.0).view(4, 3)
LABELS = torch.tensor([0, 1, 2, 3])


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


def of_kind(kind, places):
    """Return a batch of some rows."""
    x, y = ROWS[places], LABELS[places]
    captions = [f"caption {place}" for place in places]
    return {
        "tensor": x,
        "pair": (x, y),
        "dict": {"x": x, "y": {"label": y}, "epoch": 3},
        "captions": [x, captions, torch.tensor(len(places))],
        "dataclass": Batch(x, y),
        "numpy": {"x": x.numpy()},
    }[kind]


@pytest.mark.parametrize("kind", ["tensor", "pair", "dict", "captions", "dataclass", "numpy"])
def test_a_sample_has_one_digest_in_any_micro_batch(kind):
    whole = samples_of(of_kind(kind, [0, 1, 2, 3]))
    assert len({*whole}) == 4
    parts = [samples_of(of_kind(kind, places)) for places in ([2, 0], [3, 1])]
    assert sorted([*parts[0], *parts[1]]) == sorted(whole)
    assert samples_of(of_kind(kind, [1, 1])) == [whole[1]] * 2


def test_padding_up_to_the_longest_of_a_micro_batch_is_no_difference():
    short = torch.tensor([[5, 6, 0]])
    assert samples_of({"ids": short}) == samples_of({"ids": torch.tensor([[5, 6, 0, 0, 0]])})
    assert samples_of({"ids": short}) != samples_of({"ids": torch.tensor([[5, 7, 0]])})


def test_a_batch_without_rows_has_no_samples():
    assert samples_of({"epoch": 3, "scale": torch.tensor(1.0)}) == []
    assert samples_of([]) == []


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("torch", lambda: torch.rand(1)),
        ("NumPy", lambda: np.random.rand()),  # noqa: NPY002 (what an owner's code may call)
        ("Python", random.random),
    ],
)
def test_a_draw_changes_the_state_of_its_generator_alone(name, draw):
    before = random_states()
    assert random_states() == before
    draw()
    after = random_states()
    assert {each for each in before if before[each] != after[each]} == {name}


def test_a_probe_has_the_bits_the_largest_value_and_some_values():
    digest, largest, some = probe(torch.tensor([[1.0, -4.0], [0.5, 2.0]]))
    assert (largest, some) == (4.0, [1.0, -4.0, 0.5, 2.0])
    assert digest != probe(torch.tensor([[1.0, -4.0], [0.5, 2.0000002]]))[0]
    assert len(probe(torch.zeros(1000))[2]) == 32
    assert probe(torch.zeros(0)) == ["", 0.0, []]
    assert probe(torch.tensor(3.0))[2] == [3.0]
    assert probe(torch.eye(2).to_sparse()) == probe(torch.eye(2))
