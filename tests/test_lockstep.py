"""The promise, for this project's own experiment: devices change its speed, not its results."""

from lockstep.testing import assert_lockstep

from lockstep_gpt import CONFIGS

SMALL = ["max_steps=4", "val_every=2", "batch.global_size=4", "batch.exact_micro_size=2"]


def test_two_ranks_compute_the_bits_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smoke = ["experiment=smoke"] if (CONFIGS / "experiment/smoke.yaml").exists() else []
    assert_lockstep("lockstep_gpt", [*smoke, *SMALL], ranks=(1, 2))
