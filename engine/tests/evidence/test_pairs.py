"""Which runs of a comparison are there already, and how many there may be."""

import json

import pytest

from lockstep.errors import UserError
from lockstep.evidence.pairs import Budget, PairedRuns
from lockstep.evidence.runs import Side


def test_finished_runs_are_found_among_any_number_of_seeds(tmp_path):
    statuses = {2: "done", 3: "done", 5: "stopped", 7: "stopped early"}
    for seed, status in statuses.items():
        run = tmp_path / "base" / str(seed)
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"status": status}))
    (tmp_path / "base/3.log").touch()
    runs = PairedRuns(tmp_path, (Side("base", "base"),), (), {}, seeds=range(3, 10**15))
    assert [[*of_side] for of_side in runs.finished()] == [[3, 7]]


def test_a_budget_ends_a_comparison():
    assert Budget().most_pairs(10) == 20
    assert Budget(pairs=7, tokens=50).most_pairs(10) == 5
    assert Budget(hours=1).most_pairs(10) > 1000
    assert Budget(hours=1).has_time(3, 2600)
    assert not Budget(hours=1).has_time(3, 2800)
    with pytest.raises(UserError, match="give at least 40"):
        Budget(tokens=39).refuse_too_small(4, 10)
    with pytest.raises(UserError, match=r"--hours=1 is too small .* take 1.1 hours"):
        Budget(hours=1).refuse_too_few_hours(4, 1, 1000)
