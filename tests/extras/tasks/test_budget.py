"""How many examples a measurement may use."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.extras.tasks.budget import FEWEST, affordable_counts, tokens_to_read

COSTS = st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=40), min_size=1, max_size=6)


def spent(costs, counts):
    return sum(
        sum(costs_of_task[:count]) for costs_of_task, count in zip(costs, counts, strict=True)
    )


@given(COSTS, st.integers(0, 20_000))
def test_the_examples_never_cost_more_than_they_may(costs, budget):
    assert spent(costs, affordable_counts(costs, budget)) <= budget


@given(COSTS)
def test_all_are_used_if_they_are_affordable_or_nothing_limits_them(costs):
    everything = [*map(len, costs)]
    total = spent(costs, everything)
    assert affordable_counts(costs, total) == everything
    assert affordable_counts(costs, None) == everything


@given(COSTS, st.integers(0, 20_000))
def test_a_task_has_enough_examples_or_none(costs, budget):
    for costs_of_task, count in zip(costs, affordable_counts(costs, budget), strict=True):
        assert count == 0 or count >= min(FEWEST, len(costs_of_task))


def test_cheap_tasks_have_more_examples_so_that_all_are_as_exact_as_possible():
    costs = [[100] * 10_000, [25] * 10_000]
    counts = affordable_counts(costs, 30_000)
    assert counts == [200, 400]  # as 1 / sqrt(cost)
    variance = sum(1 / count for count in counts)
    for shift in (-40, 40):
        other = [counts[0] + shift, counts[1] - 4 * shift]
        assert sum(1 / count for count in other) > variance


def test_what_a_small_task_leaves_is_for_the_others():
    assert affordable_counts([[10] * 5, [10] * 10_000], 1050) == [5, 100]


def test_two_percent_of_training_reads_fewer_tokens_than_three_for_each_trained_one():
    assert tokens_to_read(0.02, 100_000) == 5000
