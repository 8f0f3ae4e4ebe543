"""The settings with which steps of a run are computed again."""

from lockstep_gpt.extras.evidence.replay import Steps, _values
from lockstep_gpt.run.directory import RunDirectory


def test_a_replay_has_the_kernels_and_the_threads_that_the_run_has_decided(finished, tmp_path):
    run = RunDirectory(finished[0].folder / "runs/first")
    copy = RunDirectory(tmp_path)
    copy.config.write_bytes(run.config.read_bytes())
    decisions = run.decisions()
    decided = {**decisions["settings"]["kernels"], "attention": "fused", "threads": 2}
    copy.keep_decisions({**decisions, "settings": {"precision": "32-true", "kernels": decided}})
    steps = Steps(copy, 0, 20, [20], devices=1, has_gpu=False, micro_size=None)
    assert _values(steps, tmp_path / "replay", None)["kernels"] == decided
    assert copy.values()["kernels"]["threads"] is None  # each start of the run itself has its own
