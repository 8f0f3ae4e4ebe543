"""Each pitfall shows its symptom, and its cure works."""

import re

import pytest
import torch

LINE = "python lab/ladder/pitfalls.py"


@pytest.fixture
def numbers(shown):
    """Return the numbers in the symptom and the cure of one pitfall."""

    def find(name):
        pattern = rf"^{name}: .+\n  symptom  (.+)\n  cure     (.+)$"
        found = re.search(pattern, shown(LINE), re.MULTILINE)
        assert found, shown(LINE)
        return [list(map(float, re.findall(r"\d+(?:\.\d+)?", part))) for part in found.groups()]

    return find


@pytest.mark.slow
def test_without_set_epoch_every_epoch_is_the_same(numbers):
    (_, same, size, _), (cured, _) = numbers("no set epoch")
    assert same == size
    assert cured < 0.02 * size


def test_ranks_without_a_sampler_repeat_the_same_work(numbers):
    (distinct, samples), cured = numbers("same data on every rank")
    assert distinct == samples / 2
    assert cured == [samples, samples]


def test_a_larger_batch_at_the_same_rate_learns_less(numbers):
    (unscaled, before), (scaled,) = numbers("unscaled learning rate")
    assert unscaled > before + 0.1
    assert abs(scaled - before) < 0.1


def test_cosine_annealing_rises_again_and_our_schedule_does_not(numbers):
    (end, *_, beyond, _), (last, later) = numbers("rate that rises again")
    assert (end, beyond) == (0.0, 0.5)
    assert last == later == 0.1


def test_weights_of_a_wrapper_are_not_silently_ignored(numbers):
    assert numbers("module prefixes") == [[0, 2], [0]]


def test_a_file_that_two_ranks_write_cannot_be_read(shown):
    assert re.search(r"reads its file back: (OSError|RuntimeError), ", shown(LINE))


def test_a_collective_of_one_rank_hangs_until_the_time_limit(numbers):
    (_, limit, seconds, _), (_, total) = numbers("collective on rank zero only")
    assert limit <= seconds < limit + 8
    assert total == 2


def test_padding_moves_the_average(numbers):
    (*_, padded, _), (cured,) = numbers("average over padding")
    assert (padded, cured) == (1.667, 2.0)


def test_batchnorm_depends_on_the_ranks_and_layernorm_does_not(numbers):
    (apart,), (*_, cured) = numbers("batchnorm of tiny batches")
    assert apart > 0.5
    assert cured == 0


def test_sums_of_one_rank_and_two_differ_unless_both_add_in_the_tree(numbers):
    (steps, leaves, bits, apart, size, *_), (*_, differing, all_of_them) = numbers(
        "sums in another order"
    )
    assert (steps, leaves, bits) == (10, 8, 32)
    assert apart > 0.02 * size
    assert (differing, all_of_them) == (0, size)


def test_an_unused_layer_stops_ddp_at_its_second_step(numbers):
    assert numbers("unused parameters") == [[1, 3], [3, 3]]


def test_an_address_under_a_launcher_waits_until_the_time_limit_up_to_torch_2_13(numbers):
    symptom, (ranks,) = numbers("address under a launcher")
    if torch.__version__ >= "2.14":  # compares versions, not texts
        *_, seconds, fault = symptom
        assert (seconds < 1, fault) == (True, 2.13)
    else:
        limit, seconds, default = symptom
        assert limit <= seconds < 10 * limit < default * 60
    assert ranks == 1
