import contextlib
import itertools
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import stop_signals
from lockstep.callbacks import clipping
from lockstep.callbacks.stopping import (
    GracefulStop,
    StopVote,
)
from lockstep.checkpoints.reading import checkpoints_in, newest_valid, step_of
from lockstep.errors import RunError
from lockstep.memory.turns import KEEP, NOT_NOW, NOTHING
from lockstep.metrics.callback import Metrics
from lockstep.processes import STOP_SIGNALS
from lockstep.stop_signals import Stopped
from lockstep.strategies import placing as strategies

DDP = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}


@pytest.fixture(autouse=True)
def handlers():
    """Restore the signal handlers."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class SignalAt(Callback):
    """Sends this process a signal in the middle of optimizer step `step`."""

    def __init__(self, step, signum):
        self.step, self.signum = step, signum

    def on_train_batch_start(self, trainer, _module, _batch, batch_idx):
        if trainer.global_step == self.step - 1 and batch_idx % 2 == 1:
            os.kill(os.getpid(), self.signum)


class Validations(Callback):
    def __init__(self):
        self.losses = {}

    def on_validation_end(self, trainer, pl_module):
        self.losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


def fit(run, folder, *callbacks, ckpt_path=None):
    stop_signals.install()  # as in a new process
    checkpoints = run.checkpoints(folder)
    run.fit(*callbacks, GracefulStop(checkpoints), checkpoints, ckpt_path=ckpt_path)


@pytest.mark.parametrize("signum", STOP_SIGNALS, ids=lambda signum: signum.name)
def test_a_signal_ends_the_run_after_its_step_is_done_and_saved(new_run, tmp_path, signum):
    run = new_run(max_steps=8, val_every=8)
    with pytest.raises(Stopped, match=f"stopped by {signum.name}") as stopped:
        fit(run, tmp_path, SignalAt(4, signum))
    assert stopped.value.signum == signum
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [4]


def test_a_stopped_run_resumes_to_the_bits_of_an_uninterrupted_one(new_run, tmp_path):
    settings = {"max_steps": 6, "val_every": 2, "model": {"dropout": 0.5}}
    uninterrupted, first, rest = (new_run(**settings) for _ in range(3))
    fit(uninterrupted, tmp_path / "whole")
    with pytest.raises(Stopped):
        fit(first, tmp_path / "stopped", SignalAt(3, signal.SIGTERM))
    fit(rest, tmp_path / "stopped", ckpt_path=newest_valid(tmp_path / "stopped"))
    for name, weight in uninterrupted.module.state_dict().items():
        assert torch.equal(rest.module.state_dict()[name], weight), name


def test_a_stop_does_not_lose_a_due_validation(new_run, tmp_path):
    settings = {"max_steps": 6, "val_every": 3}
    alone, before, after = Validations(), Validations(), Validations()
    fit(new_run(**settings), tmp_path / "whole", alone)
    with pytest.raises(Stopped):
        fit(new_run(**settings), tmp_path / "run", SignalAt(3, signal.SIGTERM), before)
    path = newest_valid(tmp_path / "run")
    fit(new_run(**settings), tmp_path / "run", after, ckpt_path=path)
    assert {**before.losses, **after.losses} == alone.losses
    assert checkpoints_in(tmp_path / "run")[0].name == checkpoints_in(tmp_path / "whole")[0].name


def test_a_signal_in_the_last_step_lets_the_run_end(new_run, tmp_path):
    fit(new_run(max_steps=3, val_every=2), tmp_path, SignalAt(3, signal.SIGTERM))
    assert step_of(checkpoints_in(tmp_path)[-1]) == 3


def test_a_stop_is_not_caught_as_an_exception():
    assert not issubclass(Stopped, Exception)


def test_a_single_rank_decides_without_communication():
    vote = StopVote(60)
    assert vote.is_alone
    assert vote.result() == (0, False)
    vote.cast(15, KEEP)
    assert vote.result() == (15, True)
    vote.cast(0)
    assert vote.result() == (0, False)


def test_ranks_keep_a_state_only_if_none_of_them_refuses(on_ranks):
    rounds = [(NOTHING, NOTHING), (KEEP, NOTHING), (KEEP, NOT_NOW), (NOTHING, NOT_NOW)]

    def decide(rank):
        vote = StopVote(60)
        decided = []
        for ballots in rounds:
            vote.cast(0, ballots[rank])
            decided.append(vote.result())
        return decided

    assert on_ranks(2, decide) == [[(0, False), (0, True), (0, False), (0, False)]] * 2


class Spoil(Callback):
    """Puts a NaN into one gradient in each of `steps`; records the weights before each step."""

    def __init__(self, *steps):
        self.steps = steps
        self.weights = {}

    def on_before_optimizer_step(self, trainer, pl_module, _optimizer):
        step = trainer.global_step + 1
        self.weights[step] = pl_module.model.final_norm.weight.detach().clone()
        if step in self.steps:
            pl_module.model.final_norm.weight.grad[3] = float("nan")


def test_a_broken_gradient_ends_the_run_before_it_touches_the_weights(new_run, tmp_path):
    run, spoil = new_run(max_steps=9, val_every=9, log_every=4), Spoil(2)
    with pytest.raises(RunError, match=r"^step 2: the gradient is not finite, and max_skip"):
        run.fit(spoil, Metrics(every=4), run.checkpoints(tmp_path))
    assert torch.equal(run.module.model.final_norm.weight, spoil.weights[2])
    assert not checkpoints_in(tmp_path)


def test_exactly_the_allowed_updates_are_skipped(new_run):
    settings = {"max_steps": 9, "val_every": 9, "log_every": 4}
    allowed = new_run(**settings, max_skipped=2)
    spoil, metrics = Spoil(2, 5), Metrics(every=4)
    allowed.fit(spoil, metrics)
    assert metrics.row["optim/skipped"] == 2
    assert [torch.equal(spoil.weights[n], spoil.weights[n + 1]) for n in range(1, 9)] == [
        n in (2, 5) for n in range(1, 9)
    ]
    again = new_run(**settings, max_skipped=2)
    with pytest.raises(RunError, match=r"^step 6: "):
        again.fit(Spoil(2, 5, 6), Metrics(every=4))


def test_skipped_updates_count_over_a_resume(new_run, tmp_path):
    settings = {"val_every": 9, "log_every": 1, "max_skipped": 1}
    first, rest = new_run(max_steps=3, **settings), new_run(max_steps=6, **settings)
    first.fit(Spoil(2), Metrics(every=1), first.checkpoints(tmp_path))
    newest = newest_valid(tmp_path)
    with pytest.raises(RunError, match=r"^step 5: "):
        rest.fit(Spoil(5), Metrics(every=1), rest.checkpoints(tmp_path), ckpt_path=newest)


class SpoilScaled(Callback):
    """Puts a NaN into a gradient of each step for which `broken(step, scale)` is true.

    Records the weights before each step, and its loss scale.
    """

    def __init__(self, broken):
        self.broken = broken
        self.weights, self.scales = {}, {}

    def on_after_backward(self, trainer, pl_module):  # before the scaler looks
        step, weight = trainer.global_step + 1, pl_module.model.final_norm.weight
        self.scales[step] = trainer.precision_plugin.scaler.get_scale()
        self.weights[step] = weight.detach().clone()
        if self.broken(step, self.scales[step]):
            weight.grad[3] = float("nan")


HALF = {"precision": "16-mixed", "val_every": 99, "log_every": 4}


def test_a_falling_loss_scale_does_not_end_the_run(new_run):
    run, metrics = new_run(**HALF, max_steps=20), Metrics(every=4)
    spoil = SpoilScaled(lambda step, scale: step > 1 and scale > 1024)
    run.fit(spoil, metrics)
    assert spoil.scales[20] <= 1024 < spoil.scales[1]
    assert metrics.row["optim/skipped"] == 0
    assert not torch.equal(spoil.weights[20], spoil.weights[19])


def test_a_gradient_that_no_scale_makes_finite_ends_the_run(new_run, tmp_path):
    run, spoil = new_run(**HALF, max_steps=60), SpoilScaled(lambda step, _: step > 8)
    first = r"^step (\d+): the gradient is not finite, and max_skipped=0; the weights are"
    with pytest.raises(RunError, match=first) as raised:
        run.fit(spoil, Metrics(every=4), run.checkpoints(tmp_path))
    step = int(re.match(first, str(raised.value))[1])
    assert (spoil.scales[step - 1], spoil.scales[step]) == (2, 1)
    assert torch.equal(run.module.model.final_norm.weight, spoil.weights[9])
    assert not checkpoints_in(tmp_path)


def test_with_a_loss_scale_weights_stay_after_too_many_skips(new_run):
    run = new_run(**{**HALF, "log_every": 40}, max_steps=60, max_skipped=1)
    spoil = SpoilScaled(lambda step, scale: step in (30, 33) or (step > 1 and scale > 1))
    with pytest.raises(RunError, match=r"^step 33: "):
        run.fit(spoil, Metrics(every=40))
    assert not torch.equal(spoil.weights[32], spoil.weights[33])
    assert torch.equal(run.module.model.final_norm.weight, spoil.weights[33])


class Reads(TorchDispatchMode):
    """Counts how often the host waits for a value from a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class ReadsPerStep(Callback):
    def __init__(self, reads):
        self.reads = reads
        self.after = []

    def on_train_batch_start(self, _trainer, _module, _batch, batch_idx):
        if batch_idx % 2 == 0:
            self.after.append(self.reads.count)


def test_no_step_but_a_logged_one_waits_for_the_device(new_run, monkeypatch):
    run = new_run(max_steps=9, val_every=9, log_every=4)
    monkeypatch.setattr(clipping, "is_asynchronous", lambda _device: True)  # as a GPU
    with Reads() as reads:
        per_step = ReadsPerStep(reads)
        run.fit(per_step, Metrics(every=4))
    counts = [after - before for before, after in itertools.pairwise(per_step.after)]
    assert [step for step, count in enumerate(counts, 1) if count] == [4, 8]


def broadcasts_of(run, *callbacks):
    """Return a function that counts the broadcasts of a fit on one of two forked ranks."""

    def count(_rank):
        Trainer.world_size = property(lambda _: 2)
        calls, broadcast = [], dist.broadcast
        dist.broadcast = lambda *args, **options: (calls.append(args), broadcast(*args, **options))
        run.fit(*callbacks)
        return len(calls)

    return count


def stops(run, folder):
    """Return a `GracefulStop` that has nothing to do."""
    return GracefulStop(run.checkpoints(folder))


def test_the_stock_loop_broadcasts_at_every_micro_batch_and_ours_never(new_run, on_ranks, tmp_path):
    # If the first fails, Lightning no longer needs our change to its loop.
    assert on_ranks(2, broadcasts_of(new_run(max_steps=3))) == [6, 6]
    run = new_run(max_steps=3)
    assert on_ranks(2, broadcasts_of(run, stops(run, tmp_path))) == [0, 0]


class Raises(Callback):
    """Keeps its Trainer, and ends a run in its third step."""

    def __init__(self, *, fails=True):
        self.fails = fails

    def on_train_batch_end(self, trainer, *_):
        self.trainer = trainer
        if self.fails and trainer.global_step == 3:
            raise ZeroDivisionError


class Handler(Callback):
    """Notes what handles SIGTERM in a fit."""

    def on_train_batch_start(self, *_):
        self.seen = signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("end", ["done", "failed", "stopped"])
def test_a_fit_leaves_lightning_and_the_process_as_they_were(new_run, tmp_path, end):
    def own_handler(*_):
        raise AssertionError

    signal.signal(signal.SIGTERM, own_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    extra = {"failed": [Raises()], "stopped": [SignalAt(3, signal.SIGTERM)]}.get(end, [])
    expected = {"failed": pytest.raises(ZeroDivisionError), "stopped": pytest.raises(Stopped)}
    run, handler = new_run(max_steps=4), Handler()
    checkpoints = run.checkpoints(tmp_path)
    parts = [handler, *extra, GracefulStop(checkpoints), checkpoints]
    with expected.get(end, contextlib.nullcontext()):
        run.fit(*parts)
    assert handler.seen == stop_signals.received.handle
    assert signal.getsignal(signal.SIGTERM) is own_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    other = Handler()
    trainer = new_run(max_steps=4).fit(other)
    assert trainer._signal_connector._sigterm_notifier_fn in other.seen.signal_handlers
    assert own_handler in other.seen.signal_handlers


@pytest.mark.parametrize("fails", [False, True])
def test_a_trainer_without_us_is_lightning_s_again(new_run, tmp_path, fails):
    raises, run = Raises(fails=fails), new_run(max_steps=4)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        run.fit(raises, stops(run, tmp_path))
    assert "_broadcast_sigterm_tensor" not in vars(raises.trainer.fit_loop.epoch_loop)
    assert "register_signal_handlers" not in vars(raises.trainer._signal_connector)


def test_a_fit_in_another_thread_than_the_main_one_trains_without_handlers(new_run, tmp_path):
    run = new_run(max_steps=3)
    with ThreadPoolExecutor(1) as threads:
        trainer = threads.submit(run.fit, stops(run, tmp_path)).result()
    assert trainer.global_step == 3


class SignalIn(Callback):
    """Sends one rank a SIGTERM in a phase of a fit."""

    def __init__(self, phase, run):
        def stop(*_arguments, **_stage):
            os.kill(os.getpid(), signal.SIGTERM)

        if phase == "train_dataloader":  # after Lightning would install its handlers
            loader = run.data.train_dataloader
            run.data.train_dataloader = lambda: (stop(), loader())[1]
        else:
            setattr(self, phase, stop)


@pytest.mark.parametrize(
    ("phase", "end"),
    [
        ("before", 2),
        ("setup", 2),
        ("on_fit_start", 2),
        ("train_dataloader", 2),
        ("on_train_start", 2),
        ("on_before_backward", 2),
        ("on_validation_start", 5),
        ("on_train_end", 6),
        ("on_fit_end", 6),
    ],
)
def test_a_sigterm_to_one_of_two_ranks_ends_both_after_the_same_step(
    new_run, on_ranks, tmp_path, phase, end
):
    def fit_one(rank):
        stop_signals.install()
        stop_signals.note()
        run = new_run(max_steps=6, val_every=3)
        checkpoints = run.checkpoints(tmp_path)
        callbacks = [GracefulStop(checkpoints), checkpoints]
        if rank == 1 and phase == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        elif rank == 1:
            callbacks.insert(0, SignalIn(phase, run))
        try:
            ddp = strategies.ddp(**DDP)
            trainer = run.fit(*callbacks, strategy=ddp, devices=2)
        except Stopped as stopped:
            saved = [step_of(path) for path in checkpoints_in(tmp_path)]
            return stopped.signum, max(saved, default=0)
        return 0, trainer.global_step

    signum = signal.SIGTERM if end < 6 else 0
    assert on_ranks(2, fit_one) == [(signum, end)] * 2


class Late(Callback):
    """Gets a hook after the run has started."""

    def on_train_start(self, *_):
        self.calls = []
        self.on_before_backward = lambda *_: self.calls.append(1)


def test_a_hook_that_a_callback_gets_late_is_called(new_run, tmp_path):
    late, run = Late(), new_run(max_steps=3)
    run.fit(late, stops(run, tmp_path))
    assert len(late.calls) == 6
