"""Three experiments whose authors knew nothing of this project, except for its two loaders."""

import signal
import sys
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

from lockstep.run.directory import RunDirectory
from lockstep.testing import assert_lockstep
from lockstep.testing.results import differences, results_of

slow = pytest.mark.slow
HERE = Path(__file__).parent
PACKAGE = PROJECT.package
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node={ranks}", "--max-restarts=1"]
# An epoch has 5 steps of 24 samples.
SHORT = ["max_steps=12", "val_every=5", "batch.global_size=24", "callbacks=[]", "logger=none"]
WORKERS = "data.workers=2"
ROUNDING = 1e-6  # of a sum of float32 numbers
CLASSIFIER, CAPTIONS, GPT2 = NAMES = ("classifier", "captions", "gpt2")


def words_of(name, *more):
    """Return the overrides that train an experiment, if its library is installed."""
    if name == GPT2:
        pytest.importorskip("transformers")
    short = [word for word in SHORT if not more or word.partition("=")[0] not in more[0]]
    return [f"--config-dir={HERE}/conf", f"module={name}", f"data={name}", *short, *more]


@pytest.fixture
def experiment(command, monkeypatch, request):
    """Check an experiment; `torchrun`: whether it starts the ranks instead of our agent."""
    request.getfixturevalue("quick_ranks")
    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    def check(name, *more, ranks, torchrun=False, **settings):
        main = PACKAGE
        if torchrun:
            main = [sys.executable, *TORCHRUN, "-m", PACKAGE, "train"]
            more = (*more, "resume=auto")
        assert_lockstep(main, words_of(name, *more), ranks=ranks, **settings)

    return check


@pytest.fixture
def train(command):
    """Train an experiment to its end; return its results."""

    def run(name, *more, run_dir):
        place = ("trainer=cpu", "log_every=1", f"run_dir={run_dir}")
        command("train", *words_of(name, *more), *place, PYTHONPATH=str(HERE))
        return results_of(RunDirectory(command.folder / run_dir))

    run.folder = command.folder
    return run


@slow
@pytest.mark.parametrize(
    ("name", "more", "ranks", "tolerance"),
    [
        (CLASSIFIER, (WORKERS,), (1, 2, 3, 4), 1e-12),
        (CAPTIONS, (), (1, 2, 3, 4), 1e-12),
        # The bias of keys has no gradient but rounding, which Adam makes larger.
        (GPT2, (WORKERS, "batch.global_size=16"), (1, 2, 4), 1e-11),
        # GPT-2 computes its own loss in float32, where only halves of it are exact. Exact sums
        # divide by 3 in float64.
        (GPT2, ("batch.exact_micro_size=2",), (1, 3), 1e-11),
    ],
)
def test_float64_is_equal_to_rounding_on_any_number_of_ranks(
    experiment, name, more, ranks, tolerance
):
    words = ("batch.micro_size=2", "precision=64-true", *more)
    experiment(name, *words, ranks=ranks, tolerance=tolerance, log_tolerance=1e-12)


@slow
def test_means_over_tokens_are_equal_on_other_micro_batches_if_each_counts_as_its_tokens(
    experiment,
):
    """A mean of means over micro-batches isn't the mean over tokens; a choice of config mends it.

    Images are augmented at random; the model draws nothing, as it would per micro-batch.
    """
    words = ("module.dropout=0", "precision=64-true", "max_steps=6")
    settings = {"ranks": (1, 3), "tolerance": 1e-12}
    with pytest.raises(AssertionError, match="3 ranks and 1 rank differ"):
        experiment(CAPTIONS, *words, **settings)
    experiment(CAPTIONS, "callbacks=[count]", *words, **settings)


@pytest.mark.parametrize(
    ("name", "more", "ranks"),
    [
        (CLASSIFIER, ("max_steps=6", WORKERS), (1, 2)),
        (CAPTIONS, ("max_steps=6",), (1, 2)),
        (GPT2, ("max_steps=6",), (1, 2)),
        pytest.param(CLASSIFIER, (), (4, 1), marks=slow),
        pytest.param(CAPTIONS, (WORKERS,), (4, 1), marks=slow),
        pytest.param(GPT2, (WORKERS,), (4, 1), marks=slow),
    ],
)
def test_exact_sums_have_equal_bits_on_any_number_of_ranks(experiment, name, more, ranks):
    """With dropout, and with images that are augmented at random."""
    experiment(name, "batch.exact_micro_size=3", *more, ranks=ranks, log_tolerance=ROUNDING)


@slow
def test_what_a_scheduler_monitors_is_found_as_a_sum_of_the_log_that_rounds(experiment):
    """Its state differs as the log does; weights and the states of the optimizer are equal."""
    with pytest.raises(AssertionError, match=r"1 of 43 states of optimizers") as failure:
        experiment(CLASSIFIER, "batch.exact_micro_size=3", "max_steps=6", ranks=(1, 2))
    assert "\ncause: rounding: weights and optimizer are equal" in str(failure.value)


@slow
@pytest.mark.parametrize(
    ("name", "more", "ranks"),
    [
        (CLASSIFIER, (), (2, 4)),
        (CAPTIONS, (WORKERS,), (1, 2)),
        (GPT2, (), (1, 4)),
    ],
)
def test_the_same_holds_under_torchrun(experiment, name, more, ranks):
    words = ("batch.exact_micro_size=3", *more)
    experiment(name, *words, ranks=ranks, torchrun=True, log_tolerance=ROUNDING)


@slow
@pytest.mark.parametrize(
    ("name", "more", "ranks", "torchrun", "after"),
    [
        # 4: the rank dies in the last step of an epoch, the command in the first one of the next.
        (CLASSIFIER, (WORKERS,), 2, False, 4),
        (CLASSIFIER, ("checkpoint.every=5",), 3, True, 7),
        (CAPTIONS, (WORKERS,), 3, False, 7),
        (CAPTIONS, (WORKERS,), 2, True, 4),
        (GPT2, (), 1, False, 4),
        (GPT2, (WORKERS,), 2, True, 8),
    ],
)
def test_a_kill_of_a_rank_and_of_the_command_changes_no_bit(
    experiment, name, more, ranks, torchrun, after
):
    words = ("batch.micro_size=2", *more)
    experiment(name, *words, ranks=(ranks,), torchrun=torchrun, kill_after=after)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_workers_change_nothing(train, name):
    none = train(name, run_dir="none")
    two = train(name, WORKERS, run_dir="two")
    assert not differences(none, two)


@slow
@pytest.mark.parametrize(
    ("hook", "memory"),
    [
        ("on_train_batch_end", "1"),
        ("on_validation_start", "false"),
        ("on_validation_end", "1"),
        ("on_train_epoch_end", "1"),
        ("on_train_epoch_end", "false"),
        ("on_train_epoch_start", "1"),
        ("on_train_epoch_start", "false"),
        ("on_save_checkpoint", "false"),
    ],
)
def test_a_death_in_any_hook_at_the_end_of_an_epoch_changes_nothing(train, hook, memory):
    """Rates, what epochs have measured, and weights: an epoch's end is done once."""
    words = ("trainer.devices=2", "checkpoint.every=1", f"memory={memory}")
    whole = train(CLASSIFIER, *words, run_dir="whole")
    note = train.folder / "died"
    dies = "+callbacks.dies"
    death = (f"{dies}._target_=deaths.Dies", f"{dies}.hook={hook}", f"{dies}.step=5")
    hurt = train(CLASSIFIER, *words, *death, f"{dies}.note={note}", run_dir="hurt")
    assert note.exists()
    assert not differences(whole, hurt)


@pytest.fixture
def start(command, wait_for):
    """Start the captions with two workers for each of two ranks; wait until they train.

    All are real processes: forks of tests have other process groups.
    """
    long = ("max_steps=9999", "val_every=2", "checkpoint.every=2", "trainer.devices=2")

    def begin(*more):
        words = words_of(CAPTIONS, *long, WORKERS, "trainer=cpu", "run_dir=run", *more)
        program = [sys.executable, "-m", PACKAGE, "train"]
        process = command.start_words([*program, *words], PYTHONPATH=str(HERE))
        present = (command.folder / "run").glob
        wait_for(lambda: process.poll() is not None or any(present("checkpoints/step=*.ckpt")))
        return process

    return begin


@slow
@pytest.mark.parametrize(
    ("signum", "data"),
    [(signal.SIGTERM, "captions"), (signal.SIGINT, "captions"), (signal.SIGTERM, "plain")],
)
def test_a_signal_to_a_run_with_workers_saves_and_leaves_no_process(
    start, command, processes_of, wait_for, signum, data
):
    """So it does with the workers of torch's own loader."""
    process = start(f"data._target_={data}.Album")
    process.send_signal(signum)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signum, f"{out}\n{err}"
    assert "Traceback" not in out + err
    assert f"stopped by {signum.name}; step " in out + err
    assert command.summary("run")["saved"] is True
    if data == "plain":
        wait_for(lambda: processes_of(command.folder / "run") == [], seconds=20)  # torch looks
    else:
        assert processes_of(command.folder / "run") == []


@slow
def test_workers_of_a_killed_run_end_at_once(start, command, wait_for, kill, processes_of):
    process = start()
    kill(process.pid)
    process.communicate(timeout=120)
    wait_for(lambda: processes_of(command.folder / "run") == [], seconds=3)


@slow
def test_an_error_in_a_worker_is_shown_once_and_is_the_owner_s(command):
    place = ("trainer=cpu", "trainer.devices=2", "run_dir=run", WORKERS)
    words = words_of(CAPTIONS, *place, "data._target_=damaged.Damaged")
    failed = command("train", *words, status=1, PYTHONPATH=str(HERE))
    printed = failed.stdout + failed.stderr
    assert printed.count("OSError: picture 7 is damaged") <= 3  # the traceback's, and the last line
    assert printed.count('damaged.py", line') == 1
    assert "failed: OSError" in printed.splitlines()[-1]
