import csv
import re
import shutil

import pytest

from lockstep_gpt import cli
from lockstep_gpt.extras.cluster import exactness
from lockstep_gpt.extras.cluster.exactness import Remains, differences, left_by
from lockstep_gpt.run.directory import RunDirectory


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_two_ranks_one_and_both_in_turn_give_one_hash(capsys):
    short = ["data.val_tokens=512", "callbacks.sample.length=1"]  # 8 validation batches
    status = cli.main(
        ["drill", "exact", "--ranks", "1,2", "--steps", "40", *short, "model.n_layer=1"]
    )
    printed = capsys.readouterr()
    assert status == 0, printed
    title, one, two, both, equal, conditions = printed.out.splitlines()
    assert title == "40 steps of 8 micro-batches of 2 samples, 1 thread per rank"
    matches = [
        re.fullmatch(r"  (.+?) +([0-9a-f]{12}) +\d+ s(.*)", line) for line in (one, two, both)
    ]
    assert [match[1] for match in matches] == ["1 rank", "2 ranks", "2 -> 1 ranks"]
    assert len({match[2] for match in matches}) == 1
    step = int(re.fullmatch(r"  resumed after step ([23]\d)", matches[2][3])[1])
    # Saves that are due, or of the best validation, which a late kill may leave.
    assert step % 5 == 0 or step % 8 == 0
    rows = len({*range(3, 40, 3), *range(8, 40, 8), 40})  # of losses, of validations
    assert equal.startswith(
        f"equal bit for bit: weights, optimizer state, {rows} rows of metrics.csv"
    )
    assert conditions.startswith("with torch ")


@pytest.fixture
def three_steps(command):
    """Train for three steps; return the run's files."""

    def train(name, *words):
        short = ["max_steps=3", "optim.warmup_steps=1", "log_every=1"]
        command.train(f"run_dir={name}", *short, *words)
        return left_by(RunDirectory(command.folder / name))

    return train


@pytest.mark.slow
def test_every_difference_except_times_is_reported(three_steps, command):
    first = three_steps("first", "seed=1")
    assert first.weights == command.summary("first")["weights"]["3"]  # from the report
    changed = RunDirectory(command.folder / "changed")
    shutil.copytree(command.folder / "first", changed.path)
    with changed.metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with changed.metrics.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, "throughput/step_seconds": "9"} for row in rows)
    assert differences({"first": first, "changed": left_by(changed)}) == []
    with changed.metrics.open("a", newline="") as file:  # such as a step that was done twice
        csv.DictWriter(file, rows[0]).writerow(rows[-1])
    (line,) = differences({"first": first, "changed": left_by(changed)})
    assert line == (
        "DIFFERENT  metrics.csv: 1 row, the first at step 3 with trainer/step: 3 (changed), "
        "nothing (first)"
    )

    weights, optimizer, metrics = differences({"1": first, "2": three_steps("other", "seed=2")})
    assert weights == "DIFFERENT  weights: 2, 1"
    assert optimizer == "DIFFERENT  optimizer state: 2, 1"
    losses = (
        r"metrics.csv: 3 rows, the first at step 1 with train/loss: \d\.\d+ \(2\), \d\.\d+ \(1\)"
    )
    assert re.fullmatch(f"DIFFERENT  {losses}", metrics)


def test_differences_end_with_status_one(monkeypatch, capsys):
    left = {"1 rank": Remains("a", "b", []), "2 ranks": Remains("c", "b", [])}
    monkeypatch.setattr(exactness, "_trained", lambda *_: left.items())
    assert cli.main(["drill", "exact"]) == 1
    assert capsys.readouterr().out.startswith("DIFFERENT  weights: 2 ranks, 1 rank\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--ranks", "1,3,8,16"],
            "batch.exact_micro_size=2 of batch.global_size=16 gives equal bits on "
            "1, 2, 4, or 8 devices, not on 3; use one of these",
        ),
        (["--ranks", "2"], "--ranks 2 compares nothing; give several, as in 1,2"),
        (["trainer.devices=2"], "trainer.devices=2 is set by the drill; use --ranks"),
        (
            ["batch.exact_micro_size=null"],
            "batch.exact_micro_size=null is equal only up to rounding",
        ),
        (["optim.lr=-1"], "optim.lr=-1.0 must be above 0"),
    ],
)
def test_settings_that_cannot_give_equal_bits_are_rejected_first(words, message, capsys):
    assert cli.main(["drill", "exact", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"lockstep-gpt drill: {message}")
