import json

from lockstep.evidence.pairs import PairedRuns
from lockstep.evidence.sides import Side


def test_finished_runs_are_found_among_any_number_of_seeds(tmp_path):
    statuses = {2: "done", 3: "done", 5: "stopped", 7: "stopped early"}
    for seed, status in statuses.items():
        run = tmp_path / "base" / str(seed)
        run.mkdir(parents=True)
        (run / "summary.json").write_text(json.dumps({"status": status}))
    (tmp_path / "base/3.log").touch()
    runs = PairedRuns(tmp_path, (Side("base", "base"),), (), {}, seeds=range(3, 10**15))
    assert [[*of_side] for of_side in runs.finished()] == [[3, 7]]
