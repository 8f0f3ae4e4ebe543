"""What validation and saving cost is measured, reported once, and warned of."""

import ast
import gc
import re
import time

import pytest
import torch
from lightning import Callback

from lockstep_gpt import processes
from lockstep_gpt.launch.launch_settings import LaunchSettings
from lockstep_gpt.run import checkpoint as files
from lockstep_gpt.run.callbacks.overhead import (
    Forecast,
    Overhead,
    Pauses,
    clock_of,
    power_of_two,
)
from lockstep_gpt.run.checkpoint_writing import CopyingCheckpointIO

LONG = 100_000  # steps, so that the rest of the run takes hours


class Slow(Callback):
    """Makes validations slow, and stops the run after `steps`."""

    def __init__(self, steps, seconds=0.0):
        self.steps, self.seconds = steps, seconds

    def on_validation_batch_end(self, *_):
        time.sleep(self.seconds)

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.steps


@pytest.fixture
def slow_disk(monkeypatch):
    """Make each write of a checkpoint take longer than any step of these tests."""
    write = files.write_checkpoint

    def slowly(*arguments):
        time.sleep(0.2)
        return write(*arguments)

    monkeypatch.setattr(files, "write_checkpoint", slowly)


COUNTER = """
import gc, lightning
class Counter(lightning.Callback):
    def __init__(self):
        self.frozen = []
    def on_train_batch_start(self, trainer, *_):
        self.frozen.append((trainer.global_step, gc.get_freeze_count()))
    def on_train_end(self, trainer, *_):
        with open(f"frozen-{trainer.global_rank}", "w") as file:
            print(dict(self.frozen), file=file)
"""


def frozen_by_step(command, *words, devices=1):
    """Return how many objects collections leave alone before each step, by rank."""
    (command.folder / "counter.py").write_text(COUNTER)
    counter = "+callbacks.counter._target_=counter.Counter"
    command.train(*words, counter, "run_dir=run", PYTHONPATH=str(command.folder))
    files = [command.folder / f"frozen-{rank}" for rank in range(devices)]
    return [ast.literal_eval(file.read_text()) for file in files]


def test_after_the_first_step_each_rank_s_collector_leaves_alone_what_it_made(command):
    words = ("trainer=cpu", "trainer.devices=2", "strategy=ddp")
    for frozen in frozen_by_step(command, *words, devices=2):
        assert frozen[1] > frozen[0] + 1000  # the model, the optimizer, and the Trainer
        assert frozen[19] <= frozen[1]  # once


def test_the_memory_of_a_process_that_goes_on_is_not_frozen(command):
    (frozen,) = frozen_by_step(command, "trainer=cpu", "launch.inline=true")
    assert frozen[19] <= frozen[0]


def test_a_run_in_a_caller_s_process_freezes_nothing(new_run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    before = gc.get_freeze_count()
    fitted(new_run(max_steps=2), tmp_path)
    assert gc.get_freeze_count() <= before
    monkeypatch.setattr(processes, "_is_own", True)
    try:
        fitted(new_run(max_steps=2), tmp_path / "own")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def overhead_of(run, checkpoints, **tokens):
    return Overhead(
        checkpoints,
        run.config.val_every,
        compiled=run.config.compile,
        background=run.config.checkpoint.background,
        grace_seconds=run.config.launch.grace_seconds,
        **tokens,
    )


def fitted(run, folder, *callbacks, io=None):
    checkpoints = run.checkpoints(folder)
    overhead = overhead_of(run, checkpoints)
    run.fit(*callbacks, overhead, checkpoints, io=io)
    return overhead


def warnings_in(caplog):
    records = caplog.get_records("call")
    return [
        record.message
        for record in records
        if record.name.endswith(".overhead") and record.levelname == "WARNING"
    ]


def reports_in(caplog):
    return [line for line in caplog.messages if line.startswith("share of the remaining time")]


def test_a_forecast_has_both_shares_and_what_they_consist_of():
    forecast = Forecast(280.0, Pauses(5, 2.0), Pauses(2, 5.0))
    assert str(forecast) == (
        "share of the remaining time: validation 3.3% (5 x 2.00 s), saving 3.3% (2 x 5.00 s)"
    )
    only_one = Forecast(10.0, Pauses(5, 2.0), Pauses(2, None))
    assert str(only_one) == "share of the remaining time: validation 50.0% (5 x 2.00 s)"


@pytest.mark.parametrize(("validation", "saving"), [(1.0, 1.0), (20.0, 0.01), (0.3, 70.0)])
def test_with_counts_divided_by_the_excess_both_take_at_most_a_tenth(validation, saving):
    before = Forecast(1000.0, Pauses(1000, validation), Pauses(1000, saving))
    counts = [1000 / max(1, before.excess(pauses)) for pauses in (before.validation, before.saving)]
    after = Forecast(1000.0, Pauses(counts[0], validation), Pauses(counts[1], saving))
    assert after.share(after.validation, after.saving) <= 0.1
    assert before.share(before.validation, before.saving) > 0.1


@pytest.mark.slow
def test_a_slow_validation_is_warned_of_once_with_settings(new_run, tmp_path, caplog):
    run = new_run(
        max_steps=LONG, val_every=2, checkpoint={"every": 1000}, optim={"warmup_steps": 1}
    )
    fitted(run, tmp_path, Slow(steps=7, seconds=0.05))
    (line,) = warnings_in(caplog)
    words = re.fullmatch(
        r"validation will take \d+\.\d% of the remaining time, more than 10%; set "
        r"val_every=(\d+)(?: or data\.val_tokens=(\d+))?",
        line,
    )
    assert words, line
    assert int(words[1]) > 2
    assert int(words[1]) % 2 == 0


def test_fewer_tokens_are_named_only_if_they_fill_a_batch(new_run, tmp_path):
    run = new_run(val_every=5)
    forecast = Forecast(1000.0, Pauses(100, 10.0), Pauses(1, None))  # 18 times too much

    def remedy(tokens):
        counts = {"tokens_per_step": run.tokens_per_step, "val_tokens": tokens}
        return overhead_of(run, run.checkpoints(tmp_path), **counts)._rarer_validation(forecast)

    step_tokens = 4 * run.config.model.block_size
    assert remedy(18 * step_tokens) == "val_every=90 or data.val_tokens=32"
    assert remedy(18 * step_tokens - 1) == "val_every=90"
    assert remedy(None) == "val_every=90"


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("background", [False, True])
def test_slow_saving_is_warned_of_with_settings(new_run, tmp_path, caplog, background):
    settings = {"every": 1, "background": background}
    run = new_run(max_steps=LONG, val_every=LONG, checkpoint=settings, optim={"warmup_steps": 1})
    # In background, each write is waited for before the next.
    fitted(run, tmp_path, Slow(steps=4), io=CopyingCheckpointIO(background=background))
    (line,) = warnings_in(caplog)
    other = "" if background else "checkpoint.background=true or "
    start = r"saving will take \d+\.\d% of the remaining time, more than 10%; set "
    assert re.fullmatch(rf"{start}{re.escape(other)}checkpoint\.every=\d+", line), line


@pytest.mark.slow
def test_a_short_run_reports_without_a_warning(new_run, tmp_path, caplog):
    caplog.set_level("INFO")
    run = new_run(max_steps=6, val_every=2, checkpoint={"every": 2})
    overhead = fitted(run, tmp_path, Slow(steps=6, seconds=0.05))
    assert warnings_in(caplog) == []
    (line,) = reports_in(caplog)
    assert re.fullmatch(r".*: validation \S+% \(2 x .* s\), saving \S+% \(2 x .* s\)", line), line
    shares = overhead.in_summary(6)
    assert 0 < shares["saving_share"] < shares["validation_share"] < 1


@pytest.mark.slow
def test_a_later_report_has_the_newest_validation(new_run, tmp_path, caplog):
    class SlowAtFirst(Callback):
        def on_validation_start(self, trainer, *_):
            if trainer.global_step == 2:
                time.sleep(3)

    caplog.set_level("INFO")
    run = new_run(max_steps=9, val_every=2, checkpoint={"every": 6})
    checkpoints = run.checkpoints(tmp_path)
    run.fit(overhead_of(run, checkpoints), SlowAtFirst(), checkpoints)
    seconds = [re.search(r"validation \S+% \(\d x (\S+) s\)", line) for line in reports_in(caplog)]
    first, second = (float(match[1]) for match in seconds)
    assert first > 3 > second


@pytest.mark.parametrize("compiled", [False, True])
def test_a_validation_that_compiles_is_not_what_is_reported(
    new_run, tmp_path, caplog, monkeypatch, compiled
):
    caplog.set_level("INFO")
    run = new_run(max_steps=9, val_every=2, checkpoint={"every": 100})
    monkeypatch.setattr(run.config, "compile", compiled)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)  # it takes a minute
    fitted(run, tmp_path)
    (line,) = reports_in(caplog)
    # To come after step 3: 4, 6, 8, 9. After step 5, the first one after the second: 6, 8, 9.
    assert f" ({3 if compiled else 4} x " in line


def test_without_pauses_there_is_no_report(new_run, tmp_path, caplog):
    caplog.set_level("INFO")
    overhead = fitted(new_run(max_steps=4, val_every=100), tmp_path)
    assert reports_in(caplog) == []
    assert Overhead.in_summary(overhead, 4)["validation_share"] > 0  # the last step's
    never_started = Overhead(overhead.checkpoints, overhead.val_every)
    assert set(never_started.in_summary(0).values()) == {None}


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("grace", "warned"), [(0.3, True), (600.0, False)])
def test_a_grace_too_short_for_a_save_is_warned_of_once(
    new_run, tmp_path, caplog, background, grace, warned
):
    settings = {"every": 1, "background": background}
    launch = LaunchSettings(grace_seconds=grace)
    run = new_run(max_steps=5, val_every=100, checkpoint=settings, launch=launch)
    fitted(run, tmp_path, io=CopyingCheckpointIO(background=background))
    lines = warnings_in(caplog)
    assert len(lines) == warned
    assert all(
        re.fullmatch(r"a save takes .* s, more than half of .*; set launch.grace_seconds=10", line)
        for line in lines
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick_ranks")
def test_rank_0_alone_reports_the_shares_and_the_summary_has_them(command):
    two = ("trainer=cpu", "trainer.devices=2", "strategy=ddp", "run_dir=run")
    out = command.train(*two).stdout
    log = (command.folder / "run" / "train.log").read_text()
    assert (out + log).count("share of the remaining time: validation") >= 1
    assert log.count("share of the remaining time: validation") == 1
    summary = command.summary("run")
    assert 0 < summary["validation_share"] < 1
    assert 0 < summary["saving_share"] < 1


def test_the_clock_is_read_once_the_device_is_done(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    clock_of(torch.device("cpu"))
    assert waited == []
    clock_of(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


@pytest.mark.parametrize(("number", "power"), [(1, 1), (1023, 512), (1024, 1024), (1025, 1024)])
def test_powers_of_two(number, power):
    assert power_of_two(number) == power
