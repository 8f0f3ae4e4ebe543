"""`assert_lockstep` passes for this project, and names the cause of each planted fault."""

import sys
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

from lockstep.errors import UserError
from lockstep.testing import assert_lockstep, experiment
from lockstep.testing.assertion import completed
from lockstep.testing.experiment import command_of, joined

PACKAGE = PROJECT.package
EXACT = "batch.exact_micro_size=2"


@pytest.fixture
def check(command, monkeypatch, request):
    """Check the smoke experiment of some steps on 1 and 2 ranks, with planted faults."""
    request.getfixturevalue("quick_ranks")
    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))

    def run(*overrides, steps=4, ranks=(1, 2), main=PACKAGE, **settings):
        short = [f"max_steps={steps}", "val_every=2", "val_tokens=256", "callbacks=[]"]
        if not any(word.startswith("data=") for word in overrides):
            short.append(f"data.root={command.data_root}")
        else:
            short.remove("val_tokens=256")
        assert_lockstep(main, ["experiment=smoke", *short, *overrides], ranks=ranks, **settings)

    return run


def planted(name):
    return f"+callbacks.planted._target_=planted.{name}"


def failure_of(check, *overrides, **settings):
    with pytest.raises(AssertionError) as failure:
        check(*overrides, **settings)
    lines = str(failure.value).splitlines()
    assert len(lines) <= 8, failure.value
    return lines


@pytest.mark.slow
def test_exact_sums_have_equal_bits_on_one_two_and_four_ranks_with_dropout(check):
    check(EXACT, "model.dropout=0.1", ranks=(1, 2, 4))


@pytest.mark.slow
def test_float64_is_equal_within_a_tolerance(check):
    check(tolerance=1e-12, precision="64-true")


@pytest.mark.slow
def test_a_tolerance_that_is_too_narrow_fails_as_rounding(check):
    head, first, begins, cause, remedy = failure_of(check, tolerance=1e-12)
    assert head.startswith("2 ranks and 1 rank differ: ")
    assert first.startswith("first in: step ")
    assert ", the gradient of " in begins or ", the loss" in begins
    assert cause.startswith(("cause: sums in another order", "cause: rounding"))
    assert "64-true" in remedy


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_rank_and_then_command_are_killed_ends_with_the_same_bits(check, ranks):
    check("model.dropout=0.1", ranks=(ranks,), kill_after=2)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_a_killed_run_lost_a_rank_and_then_its_command(command, monkeypatch):
    monkeypatch.chdir(command.folder)
    saves = "checkpoint.every=1"  # else ranks may restart before a state, and print a receipt
    words = command.smoke("max_steps=4", "trainer.accelerator=cpu", "log_every=1", saves)[1:]
    run = experiment.Experiment(PACKAGE, words, command.folder).train_killed("killed", 2, 2)
    deaths = {note.name for note in (command.folder / "killed.kills").iterdir()}
    assert deaths == {"rank", "command"}
    output = (command.folder / "killed.output").read_text("utf-8")
    assert output.count("restarting") == 1
    assert output.count("\n  batch  ") == 2  # two commands printed a receipt
    assert run.read_summary()["status"] == "done"


@pytest.mark.slow
def test_a_run_may_start_by_any_command_that_takes_overrides(check, command):
    script = command.folder / "own.py"
    lines = [
        "import sys",
        f"import {PACKAGE}",
        "from lockstep.commands import main",
        'sys.exit(main(["train", *sys.argv[1:]]))',
    ]
    script.write_text("\n".join(lines))
    check(EXACT, steps=1, main=[sys.executable, str(script)])


@pytest.mark.slow
def test_sharded_weights_are_recorded_whole(check):
    words = ["strategy=fsdp2", planted("RateByRank")]
    *_, begins, cause, _ = failure_of(check, *words, tolerance=1e-3)
    assert begins == "begins at: step 3, the learning rate: 0.000975, 0.00195 on rank 1"
    assert cause.startswith("cause: a scheduler or optimizer by rank")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "begins", "cause"),
    [
        ("SeedsByRank", "step 1, random numbers: micro-batch 3 begins with", "dropout or other"),
        ("OwnNoise", "step 1, the loss of micro-batch 3: ", "the module computes by rank"),
        ("RateByRank", "step 3, the learning rate: ", "a scheduler or optimizer by rank"),
        ("UpdateByRank", "step 1, model.token_embedding.weight after the", "an optimizer by rank"),
    ],
)
def test_what_depends_on_the_rank_is_found_where_it_begins(check, fault, begins, cause):
    words = [EXACT, "model.dropout=0.1", planted(fault)]
    *_, begins_at, found, remedy = failure_of(check, *words)
    assert begins_at.startswith(f"begins at: {begins}")
    assert found.startswith(f"cause: {cause}")
    assert remedy.startswith("remedy: ")


@pytest.mark.slow
def test_a_rank_s_own_order_of_samples_is_found_as_data(check, command):
    choice = command.folder / "own" / "data"
    choice.mkdir(parents=True)
    (choice / "by_rank.yaml").write_text(
        "_target_: planted.DataByRank\nblock_size: ${model.block_size}\n"
    )
    own = ["data=by_rank", f"--config-dir={choice.parent}"]
    *_, begins, cause, remedy = failure_of(check, EXACT, *own)
    assert begins.startswith("begins at: step 1, the samples: ")
    assert begins.endswith("of 8 samples are others")
    assert cause.startswith("cause: data by rank")
    assert "train_loader" in remedy


@pytest.mark.slow
def test_batchnorm_is_found_by_its_name(check):
    words = [planted("WithBatchNorm"), "strategy=ddp"]
    *_, begins, cause, _ = failure_of(check, *words, tolerance=1e-9, precision="64-true")
    assert begins.startswith("begins at: step 1, the loss: ")
    assert cause.startswith("cause: BatchNorm (model.final_norm.1)")


@pytest.mark.slow
def test_dropout_without_fixed_micro_batches_is_found(check):
    words = ["model.dropout=0.1"]
    *_, begins, cause, remedy = failure_of(check, *words, tolerance=1e-9, precision="64-true")
    assert begins.startswith("begins at: step 1, the loss: ")
    assert cause.startswith("cause: dropout or other random numbers: noise belongs")
    assert "set batch.micro_size" in remedy
    check("model.dropout=0.1", "batch.micro_size=2", tolerance=1e-9, precision="64-true")


@pytest.mark.slow
def test_a_metric_of_one_rank_is_found_without_further_runs(check):
    head, _, begins, cause, remedy = failure_of(check, EXACT, planted("LogsByRank"))
    assert head == "2 ranks and 1 rank differ: 4 of 4 rows of metrics.csv"
    assert begins.startswith("begins at: step 1, train/own of metrics.csv: ")
    assert cause.startswith("cause: a metric by rank")
    assert remedy.startswith("remedy: log it with Mean")


@pytest.mark.slow
def test_a_state_that_no_checkpoint_keeps_is_found_after_a_kill(check):
    fault = planted("Forgets")
    head, _, begins, cause, _ = failure_of(check, fault, steps=5, ranks=(1,), kill_after=3)
    assert head.startswith("1 rank, killed and 1 rank differ: ")
    assert begins.startswith("begins at: step 3, the gradient of ")
    assert cause.startswith("cause: a state that isn't in the checkpoint")


@pytest.mark.slow
def test_a_metric_that_no_checkpoint_keeps_is_found_after_a_kill(check):
    fault = planted("LogsSinceStart")
    *_, begins, cause, _ = failure_of(check, fault, ranks=(1,), kill_after=2)
    assert begins.startswith("begins at: step ")
    assert "train/steps of metrics.csv: " in begins
    assert cause.startswith("cause: a metric that isn't in the checkpoint")


@pytest.mark.slow
def test_a_run_that_fails_shows_its_error_and_the_end_of_its_log(check):
    with pytest.raises(AssertionError) as failure:
        check(EXACT, planted("Raises"))
    first, *log = str(failure.value).splitlines()
    assert first.startswith("the run on 1 rank failed: rank 0 failed: ValueError: planted")
    assert any("planted.py" in line for line in log)
    assert len(log) <= 12


@pytest.mark.slow
def test_a_wrong_setting_is_one_line(check):
    (line,) = failure_of(check, EXACT, "optim.lr=-1")
    assert "did not begin: lockstep-gpt train: " in line
    assert "lr=-1 must be above 0" in line


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended(check, monkeypatch):
    monkeypatch.setattr(experiment, "LIMIT", 0.3)
    (line,) = failure_of(check, EXACT)
    assert line == "the run on 1 rank had not ended after 0.3 s and was stopped"


@pytest.mark.slow
def test_a_kill_that_would_come_too_late_is_refused(check):
    with pytest.raises(UserError, match="kill_after=4 is too late"):
        check(ranks=(1,), kill_after=4)


@pytest.mark.slow
def test_equal_bits_without_exact_sums_are_refused_in_one_line(check):
    with pytest.raises(UserError, match="tolerance=None needs equal bits"):
        check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": (2,)}, "ranks=(2,) compares nothing; give several"),
        ({"ranks": (0, 1)}, "ranks=(0, 1) must be numbers of at least 1"),
        ({"ranks": ()}, "ranks=() must be numbers"),
        ({"kill_after": 0}, "kill_after=0 must be at least 1"),
        ({"main": "own.train:main"}, "main=own.train:main is no package"),
    ],
)
def test_arguments_that_compare_nothing_are_refused(settings, message):
    with pytest.raises(UserError) as mistake:
        assert_lockstep(**{"main": PACKAGE, **settings})
    assert str(mistake.value).startswith(message)


def test_main_is_a_package_or_the_words_of_a_command():
    assert command_of("own.gpt") == [sys.executable, "-m", "own.gpt", "train"]
    assert command_of(["torchrun", "train.py"]) == ["torchrun", "train.py"]


def test_what_the_overrides_set_is_not_set_again():
    assert completed(["a=1"], None) == [
        "a=1",
        "trainer.accelerator=cpu",
        "logger=none",
        "log_every=1",
    ]
    assert completed(["trainer=gpu", "logger=csv"], 5) == [
        "trainer=gpu",
        "logger=csv",
        "log_every=1",
        "checkpoint.every=4",
    ]


@pytest.mark.parametrize(
    "words", [["--config-dir", "own", "a=1"], ["a=1", "--config-dir=own"], ["a=1", "-cd", "own"]]
)
def test_settings_of_a_check_are_on_the_same_side_of_flags_as_the_others(words):
    place = words.index("a=1")
    assert joined(words, ["b=2"]) == [*words[: place + 1], "b=2", *words[place + 1 :]]
