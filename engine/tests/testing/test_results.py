"""Two runs' results are compared to the bit, or within a tolerance; times don't count."""

import pytest
import torch

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory
from lockstep.testing.results import (
    Results,
    differences,
    first_of,
    flat,
    results_of,
    rows_of,
)


@pytest.fixture
def results():
    """Return results with changes: a weight, a state, or a cell of the second row."""

    def make(weight=1.5, moment=0.25, loss="2.0", rows=2, scale=1.0):
        table = [
            {"trainer/step": str(i), "train/loss": "4.0" if i == 1 else loss, "val/loss": ""}
            for i in range(1, rows + 1)
        ]
        state = {
            "state_dict": {"a": torch.tensor([scale, weight]), "b": torch.tensor([1, 2])},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.tensor([moment]), "step": 3}}}],
            "lr_schedulers": [{"last": 0.1}],
        }
        return Results(table, dict(flat(state)))

    return make


def test_equal_results_have_no_difference_and_one_digest(results):
    assert not differences(results(), results())
    assert results().digest() == results(moment=1.0).digest() != results(weight=1.6).digest()


def test_all_kinds_of_differences_are_counted(results):
    found = differences(results(), results(weight=1.6, moment=0.3, loss="2.1"))
    assert found.weights == ["a"]
    assert found.states == ["optimizer_states.0.state.0.exp_avg"]
    assert found.text() == (
        "1 of 2 rows of metrics.csv, 1 of 2 weights, 1 of 3 states of optimizers"
    )
    assert first_of(found, ["1 rank", "2 ranks"].__getitem__) == (
        "step 2, train/loss of metrics.csv: 2.0 (1 rank), 2.1 (2 ranks)"
    )


def test_a_difference_of_the_last_bit_counts_without_a_tolerance_only(results):
    after = torch.nextafter(torch.tensor(1.5), torch.tensor(2.0)).item()
    found = differences(results(), results(weight=after))
    assert (found.rows, found.weights, found.states) == (0, ["a"], [])
    assert first_of(found, str) == "the last checkpoint, a; no row of 2 rows differs"
    assert not differences(results(), results(weight=after), tolerance=1e-6)
    assert differences(results(), results(weight=after), tolerance=1e-8)


def test_the_log_and_what_schedulers_keep_of_it_may_have_a_tolerance_of_their_own(results):
    ours, theirs = results(), results(loss="2.0000001")
    theirs.state["lr_schedulers.0.last"] = 0.10000001
    found = differences(ours, theirs)
    assert (found.rows, found.states) == (1, ["lr_schedulers.0.last"])
    assert not differences(ours, theirs, log_tolerance=1e-6)
    assert differences(ours, theirs, log_tolerance=1e-8)
    assert differences(ours, results(moment=0.3), log_tolerance=1.0).states


def test_infinite_states_are_near_themselves_only(results):
    ours, theirs = results(), results()
    for both in (ours, theirs):
        both.state["lr_schedulers.0.mode_worse"] = float("inf")
    assert not differences(ours, theirs, tolerance=1e-12)
    theirs.state["lr_schedulers.0.mode_worse"] = 1.0
    assert differences(ours, theirs, tolerance=1e-12)


def test_the_sign_of_a_zero_is_a_bit(results):
    assert differences(results(moment=0.0), results(moment=-0.0)).states


@pytest.mark.parametrize(("tolerance", "is_equal"), [(0.0011, True), (0.0009, False)])
def test_a_tolerance_is_relative_to_the_largest_value(results, tolerance, is_equal):
    # 0.1 of 100 in a tensor whose other element is 100; 0.004 of 4 in a column.
    ours, theirs = results(scale=100.0), results(scale=100.0, weight=1.6, loss="2.004")
    assert bool(differences(ours, theirs, tolerance)) != is_equal


def test_a_number_that_is_none_is_never_near(results):
    assert differences(results(), results(loss="nan"), tolerance=1.0).rows == 1
    assert differences(results(), results(weight=float("nan")), tolerance=1.0).weights == ["a"]
    assert differences(results(), results(loss=""), tolerance=1.0).rows == 1
    assert not differences(results(loss="nan"), results(loss="nan"))


def test_a_row_or_a_weight_that_one_run_lacks_is_a_difference(results):
    found = differences(results(), results(rows=3))
    assert (found.rows, found.cells[0].step) == (1, 3)
    without = Results(results().rows, {**results().state})
    del without.state["state_dict.b"]
    assert differences(results(), without).weights == ["b"]
    assert differences(without, results()).weights == ["b"]


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="saved no checkpoint to compare"):
        results_of(RunDirectory(tmp_path))


def test_times_are_no_results(tmp_path):
    run = RunDirectory(tmp_path)
    assert rows_of(run) == []
    run.metrics.write_text(
        "trainer/step,train/loss,throughput/step_seconds,system/peak_memory_gb,data/wait_share\n"
        "1,2.5,0.1,3,0.2\n"
    )
    assert rows_of(run) == [{"trainer/step": "1", "train/loss": "2.5"}]
