import hashlib
import math
import os
from pathlib import Path

import lightning
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning import Callback

from lockstep.callbacks.step import StepCallback
from lockstep.checkpoints.callback import Checkpoints
from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    newest_valid,
    step_of,
)
from lockstep.checkpoints.sums import fault_of
from lockstep.errors import UserError
from lockstep.metrics.callback import Metrics
from lockstep.run.planned_pauses import saves_after, validations_after
from lockstep.strategies import placing as strategies


class Losses(Callback):
    """Records or sets the validation loss of each step, and records the checkpoints before it."""

    def __init__(self, folder, dictated):
        self.folder, self.dictated = folder, dict(dictated)
        self.seen, self.saved_before = {}, {}

    def on_validation_start(self, trainer, pl_module):
        self.saved_before[trainer.global_step] = steps_in(self.folder)
        vars(pl_module.val_loss).pop("columns", None)
        dictated = self.dictated.get(trainer.global_step)
        if dictated is not None:
            pl_module.val_loss.columns = lambda _ranks: {"val/loss": float(dictated)}

    def on_validation_end(self, trainer, pl_module):
        self.seen[trainer.global_step] = trainer.callback_metrics["val/loss"].item()


def steps_in(folder):
    return [step_of(path) for path in checkpoints_in(folder)]


def fitted(run, folder, losses=(), ckpt_path=None):
    checkpoints, validation = run.checkpoints(folder), Losses(folder, losses)
    run.fit(validation, checkpoints, ckpt_path=ckpt_path)
    return checkpoints, validation


def test_the_last_step_is_always_validated_and_saved(new_run, tmp_path):
    run = new_run(max_steps=5, val_every=3, checkpoint={"every": 4})
    checkpoints, validation = fitted(run, tmp_path)
    assert list(validation.seen) == [3, 5]
    assert checkpoints.in_summary(0)["last_checkpoint"] == str(tmp_path / "step=000005.ckpt")


def test_the_last_step_is_validated_below_the_trainer_s_least(new_run, tmp_path):
    run, validation = new_run(max_steps=5, val_every=3), Losses(tmp_path, ())
    run.fit(validation, run.checkpoints(tmp_path), min_steps=9)
    assert list(validation.seen) == [3, 5]


@pytest.mark.parametrize("earlier_steps", [4, 6, 8])
def test_a_run_that_starts_again_keeps_the_checkpoints_of_the_other_model(
    new_run, tmp_path, earlier_steps
):
    fitted(new_run(max_steps=earlier_steps, checkpoint={"every": None}), tmp_path)
    earlier = checkpoint_path(tmp_path, earlier_steps).read_bytes()
    fitted(new_run(max_steps=6, seed=1, checkpoint={"every": None}), tmp_path)
    assert steps_in(tmp_path)[-1] == 6
    kept = checkpoint_path(tmp_path / "replaced", earlier_steps)
    assert kept.read_bytes() == earlier
    assert fault_of(kept) is None


def test_without_a_period_only_the_best_and_the_end_are_saved(new_run, tmp_path):
    run = new_run(max_steps=6, val_every=2, checkpoint={"every": None})
    fitted(run, tmp_path, losses={2: 3.0, 4: 4.0, 6: 5.0})
    assert steps_in(tmp_path) == [2, 6]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "steps", "best"),
    [
        (1, 0, [6], 6),
        (3, 0, [4, 5, 6], 5),
        (1, 1, [2, 6], 2),
        (1, 2, [2, 5, 6], 2),
        (2, 1, [2, 5, 6], 2),
        (9, 9, [1, 2, 3, 4, 5, 6], 2),
    ],
)
def test_the_newest_and_the_best_are_kept(new_run, tmp_path, keep_last, keep_best, steps, best):
    settings = {"every": 1, "keep_last": keep_last, "keep_best": keep_best}
    run = new_run(max_steps=6, val_every=1, checkpoint=settings)
    checkpoints, _ = fitted(run, tmp_path, losses={1: 9, 2: 1, 3: 5, 4: 4, 5: 3, 6: 8})
    assert steps_in(tmp_path) == steps
    assert step_of(Path(checkpoints.in_summary(0)["best_checkpoint"])) == best
    assert checkpoints.in_summary(0)["last_checkpoint"].endswith("step=000006.ckpt")


@pytest.mark.parametrize(
    ("every", "val_every", "keep_best", "steps"),
    [
        (4, 1, 1, [4, 8, 9]),
        (3, 2, 1, [3, 4, 6, 9]),
        (2, 4, 1, [2, 4, 6, 8, 9]),
        (5, 3, 1, [5, 6, 9]),
        (2, 3, 1, [2, 3, 4, 6, 8, 9]),
        (2, 3, 0, [2, 4, 6, 8, 9]),
        (20, 1, 1, [9]),
        (None, 3, 1, [3, 6, 9]),
        (None, 3, 0, [9]),
    ],
)
def test_a_best_loss_saves_at_most_as_often_as_the_period(
    new_run, tmp_path, every, val_every, keep_best, steps
):
    settings = {"every": every, "keep_last": 9, "keep_best": keep_best}
    run = new_run(max_steps=9, val_every=val_every, checkpoint=settings)
    losses = {step: 9.0 - step for step in range(1, 10)}  # each is the best so far
    _, validation = fitted(run, tmp_path, losses)
    assert steps_in(tmp_path) == steps
    assert validations_after(0, val_every, 9) == len(validation.seen)


@given(every=st.none() | st.integers(1, 14), val_every=st.integers(1, 14), total=st.integers(1, 50))
@pytest.mark.parametrize("keep_best", [0, 1])
def test_the_saves_to_come_are_counted(keep_best, every, val_every, total):
    checkpoints = Checkpoints(Path(), every, keep_best=keep_best)
    validated, saved = [], []
    for step in range(1, total + 1):
        validates = step == total or step % val_every == 0
        if validates:
            validated.append(step)
        if checkpoints.is_due(step, total) or (validates and checkpoints.is_best(step, 0.0)):
            saved.append(step)
            checkpoints.last_validated = step if validates else checkpoints.last_validated
    for now in range(total):
        to_come = saves_after(now, every, val_every, total, keeps_best=keep_best > 0)
        assert to_come == sum(step > now for step in saved)
        assert validations_after(now, val_every, total) == sum(step > now for step in validated)


def test_a_resumed_run_keeps_the_distance_to_the_last_best_checkpoint(new_run, tmp_path):
    settings = {"every": 4, "keep_last": 1, "keep_best": 1}
    first = new_run(max_steps=8, val_every=3, checkpoint=settings)
    checkpoints, _ = fitted(first, tmp_path)
    rest = new_run(max_steps=20, val_every=3, checkpoint=settings).checkpoints(tmp_path)
    rest.load_state_dict(checkpoints.state_dict())
    assert not rest.is_best(11, 0.0)
    assert rest.is_best(12, 0.0)


def test_the_folder_contains_only_checkpoints_and_checksums(new_run, tmp_path):
    fitted(new_run(checkpoint={"every": 2, "keep_last": 9}), tmp_path)
    names = [f"step=00000{step}.ckpt{end}" for step in (2, 3, 4, 6) for end in ("", ".sha256")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all(fault_of(path) is None for path in checkpoints_in(tmp_path))


def test_a_checkpoint_is_saved_after_its_step_s_validation(new_run, tmp_path):
    run = new_run(max_steps=4, val_every=2, checkpoint={"every": 2, "keep_last": 9})
    _, validation = fitted(run, tmp_path)
    assert validation.saved_before == {2: [], 4: [2]}
    for step, loss in validation.seen.items():
        content = torch.load(tmp_path / f"step=00000{step}.ckpt", weights_only=True)
        (state,) = (state for name, state in content["callbacks"].items() if "Checkpoints" in name)
        assert state["losses"][step] == loss


def test_a_checkpoint_has_only_plain_values_and_all_that_readers_need(new_run, tmp_path):
    run = new_run(max_steps=3)
    fitted(run, tmp_path)
    content = torch.load(tmp_path / "step=000003.ckpt", weights_only=True)
    assert content["config"] == run.content(None)["config"]
    assert content["Tokens"]["tokenizer"] == run.data.tokenizer.to_dict()
    loader = content["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    assert (loader, content["global_step"]) == ({"step": 3, "samples": 12}, 3)
    weights = run.module.model.state_dict()
    assert set(content["state_dict"]) == {f"model.{name}" for name in weights}
    assert all(torch.equal(content["state_dict"][f"model.{n}"], w) for n, w in weights.items())


def test_a_resumed_run_remembers_its_best_checkpoint(new_run, tmp_path):
    settings = {"every": 1, "keep_last": 1, "keep_best": 1}
    fitted(new_run(max_steps=2, val_every=1, checkpoint=settings), tmp_path, {1: 1.0, 2: 2.0})
    run = new_run(max_steps=4, val_every=1, checkpoint=settings)
    checkpoints, _ = fitted(run, tmp_path, {3: 3.0, 4: 4.0}, newest_valid(tmp_path))
    assert steps_in(tmp_path) == [1, 4]
    assert checkpoints.in_summary(0)["best_checkpoint"] == str(tmp_path / "step=000001.ckpt")


def test_a_deleted_checkpoint_is_no_longer_the_best(new_run, tmp_path):
    settings = {"every": 1, "keep_last": 9, "keep_best": 1}
    fitted(new_run(max_steps=3, val_every=1, checkpoint=settings), tmp_path, {1: 1, 2: 3, 3: 4})
    (tmp_path / "step=000001.ckpt").unlink()
    run = new_run(max_steps=4, val_every=1, checkpoint=settings)
    checkpoints, _ = fitted(run, tmp_path, {4: 5.0}, newest_valid(tmp_path))
    assert checkpoints.in_summary(0)["best_checkpoint"] == str(tmp_path / "step=000002.ckpt")


def test_all_ranks_agree_on_the_best_checkpoint(on_ranks, new_run, tmp_path):
    folders = [tmp_path / "seen", tmp_path / "not_yet"]  # as a network folder may look for a while
    for step in (2, 3):
        checkpoint_path(folders[0], step).parent.mkdir(exist_ok=True)
        checkpoint_path(folders[0], step).touch()

    def restored(rank):
        checkpoints = new_run().checkpoints(folders[rank])
        values = {1: 0.5, 2: 1.0, 3: 2.0}
        state = {"losses": values, "last_validated": 3, "monitor": "val/loss"}
        checkpoints.load_state_dict(state)
        return checkpoints.values

    assert on_ranks(2, restored) == [{2: 1.0, 3: 2.0}] * 2


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(new_run, tmp_path):
    settings = {"model": {"dropout": 0.5}, "checkpoint": {"every": 1, "keep_last": 9}}
    uninterrupted = new_run(max_steps=6, **settings)
    fitted(uninterrupted, tmp_path)
    rest = new_run(max_steps=6, **settings)
    fitted(rest, tmp_path / "rest", ckpt_path=tmp_path / "step=000004.ckpt")
    for name, weight in uninterrupted.module.state_dict().items():
        assert torch.equal(rest.module.state_dict()[name], weight), name


def test_removing_a_checkpoint_removes_its_checksum(new_run, tmp_path):
    fitted(new_run(checkpoint={"every": 1, "keep_best": 0}), tmp_path)
    (path,) = checkpoints_in(tmp_path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (tmp_path / f"{path.name}.sha256").read_text() == f"{digest}  {path.name}\n"
    assert len(list(tmp_path.iterdir())) == 2


class Score(Callback):
    """Logs a metric of one's own after each validation; each step's value is dictated."""

    def __init__(self, values):
        self.values = values

    def on_validation_epoch_end(self, trainer, _module):
        self.log("val/score", self.values[trainer.global_step])


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 2)])
def test_any_logged_metric_decides_which_checkpoint_is_the_best(new_run, tmp_path, mode, best):
    run = new_run(max_steps=4, val_every=1)
    checkpoints = Checkpoints(tmp_path, every=1, monitor="val/score", mode=mode)
    run.fit(Score({1: 5.0, 2: 7.0, 3: 2.0, 4: 3.0}), checkpoints)
    assert steps_in(tmp_path) == [best, 4]
    assert checkpoints.in_summary(4)["best_checkpoint"] == str(checkpoint_path(tmp_path, best))


@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_is_not_a_number_never_is_the_best(new_run, tmp_path, mode):
    run = new_run(max_steps=4, val_every=1)
    checkpoints = Checkpoints(tmp_path, every=None, monitor="val/score", mode=mode)
    run.fit(Score({1: math.nan, 2: 3.0, 3: math.nan, 4: math.nan}), checkpoints)
    assert steps_in(tmp_path) == [2, 4]  # the last step is saved whatever its value is
    assert checkpoints.values == {2: 3.0}


def test_a_metric_that_nobody_logs_is_one_line_with_those_that_exist(new_run, tmp_path):
    line = "^monitor=val/acc decides .* only .*val/loss, val/perplexity is logged; monitor one"
    with pytest.raises(UserError, match=line):
        new_run(max_steps=4, val_every=1).fit(Checkpoints(tmp_path, monitor="val/acc"))
    unmonitored = Checkpoints(tmp_path, every=2, keep_best=0, keep_last=9, monitor="val/acc")
    new_run(max_steps=4, val_every=1).fit(unmonitored)
    assert steps_in(tmp_path) == [2, 4]


def test_a_metric_of_training_is_known_at_a_validation_before_the_first_row(new_run, tmp_path):
    """Also right after a resume: then it is the value that an undisturbed run has there."""
    settings = {"monitor": "train/loss", "every": 1, "keep_last": 9}
    whole = Checkpoints(tmp_path / "whole", **settings)
    rows = {"val_every": 1, "max_steps": 4, "log_every": 3}
    new_run(**rows).fit(whole)
    assert [*whole.values] == [3, 4]  # the row of step 3 is the first, and the last step has one
    resumed = Checkpoints(tmp_path / "resumed", **settings)
    new_run(**{**rows, "max_steps": 5, "log_every": 9}).fit(
        resumed, ckpt_path=tmp_path / "whole/step=000003.ckpt"
    )
    assert resumed.values[4] == whole.values[3]


class Following(torch.optim.lr_scheduler.LinearLR):
    """A warmup whose state has the scheduler that follows, as those of other libraries have."""

    def __init__(self, optimizer):
        self.following = torch.optim.lr_scheduler.ConstantLR(optimizer)
        super().__init__(optimizer)


def test_a_state_that_cannot_be_read_again_is_refused_before_the_first_step(new_run, tmp_path):
    run = new_run(max_steps=4)
    optimizers = run.module.configure_optimizers
    steps = []

    def with_following():
        made = optimizers()
        return {**made, "lr_scheduler": {"scheduler": Following(made["optimizer"])}}

    run.module.configure_optimizers = with_following
    run.module.on_train_batch_end = lambda *_: steps.append(1)
    line = "lr_schedulers.0.following, of the kind ConstantLR, which cannot be read again"
    with pytest.raises(UserError, match=line):
        run.fit(Checkpoints(tmp_path))
    assert steps == []


def test_values_of_another_metric_do_not_count(tmp_path):
    before = Checkpoints(tmp_path, monitor="val/score")
    before.values = {1: 2.0}
    checkpoint_path(tmp_path, 1).touch()
    same, other = Checkpoints(tmp_path, monitor="val/score"), Checkpoints(tmp_path)
    same.load_state_dict(before.state_dict())
    other.load_state_dict(before.state_dict())
    assert (same.values, other.values) == ({1: 2.0}, {})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"every": 0}, "every=0 must be at least 1"),
        ({"keep_last": 0}, "keep_last=0 must be at least 1"),
        ({"keep_best": -1}, "keep_best=-1 must be at least 0"),
        ({"mode": "largest"}, "mode=largest is not one of min, max"),
    ],
)
def test_a_wrong_argument_is_one_line(tmp_path, settings, line):
    with pytest.raises(UserError, match=f"^{line}$"):
        Checkpoints(tmp_path, **settings)


LIGHTNINGS_NOISE = pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:The '.*_dataloader' does not have many workers",
)


def plain_trainer(run, *callbacks, **settings):
    """Return a Trainer without any plug-in of ours but `callbacks`."""
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        logger=False,
        accumulate_grad_batches=run.batch.accumulation,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


@LIGHTNINGS_NOISE
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, [4, 8, 9]),  # three steps each; a validation after each epoch
        ({"max_epochs": 3, "limit_val_batches": 0}, [4, 8, 9]),
        ({"max_epochs": 3, "val_check_interval": 4}, [4, 8, 9]),  # after steps 2, 5, 8
        ({"max_epochs": -1, "max_steps": 5}, [4, 5]),
    ],
)
def test_a_run_bounded_by_epochs_saves_due_steps_and_its_end(new_run, tmp_path, settings, steps):
    run = new_run(max_steps=99)
    checkpoints = Checkpoints(tmp_path, every=4, keep_last=9, keep_best=0)
    plain_trainer(run, checkpoints, limit_train_batches=6, **settings).fit(run.module, run.data)
    assert steps_in(tmp_path) == steps


@LIGHTNINGS_NOISE
def test_neither_a_sanity_check_nor_a_validation_alone_saves(new_run, tmp_path):
    run = new_run(max_steps=3)
    checkpoints = Checkpoints(tmp_path, every=1)
    trainer = plain_trainer(run, Metrics(), checkpoints, max_steps=3, num_sanity_val_steps=2)
    trainer.validate(run.module, run.data, verbose=False)
    assert steps_in(tmp_path) == []
    trainer.fit(run.module, run.data)
    assert steps_in(tmp_path) == [3]


def test_a_monitored_metric_of_each_rank_alone_is_rank_0_s(on_ranks, new_run, tmp_path):
    """Ranks that decide by values of their own would wait for each other in a save."""

    def fit(rank):
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        run = new_run(max_steps=4, val_every=1)
        values = {step: float(step if rank else -step) for step in range(1, 5)}
        checkpoints = Checkpoints(tmp_path, every=None, monitor="val/score")
        strategy = strategies.ddp(
            process_group_backend="gloo", timeout_seconds=60, comm_hook="none"
        )
        run.fit(Score(values), checkpoints, strategy=strategy, devices=2)
        return checkpoints.values

    assert on_ranks(2, fit) == [{4: -4.0}, {1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0}]


def test_it_is_told_before_a_step_s_end_whether_a_validation_follows(new_run, tmp_path):
    told = []

    class Told(StepCallback):
        def on_step_end(self, trainer, _module, step):
            if checkpoints.validates(trainer):
                told.append(step)

    run = new_run(max_steps=8, val_every=3)
    checkpoints, validation = run.checkpoints(tmp_path), Losses(tmp_path, {})
    run.fit(Told(), validation, checkpoints)
    assert told == [*validation.seen] == [3, 6, 8]


FSDP2 = {
    "process_group_backend": None,
    "timeout_seconds": 60,
    "reshard_after_forward": True,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "save_parts": False,
}


class Average(Callback):
    """Keeps an average of weights, which with FSDP2 are shards."""

    def on_fit_start(self, trainer, pl_module):
        self.average = {
            name: weight.detach().clone() for name, weight in pl_module.named_parameters()
        }

    def state_dict(self):
        return {"average": self.average}


def test_shards_in_a_callback_s_state_are_refused_before_the_first_step(
    on_ranks, new_run, tmp_path
):
    """A checkpoint would have only those of rank 0."""

    def train(_rank):
        run = new_run(max_steps=3)
        os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        with pytest.raises(UserError) as refusal:
            run.fit(Average(), Checkpoints(tmp_path), strategy=strategies.fsdp2(**FSDP2), devices=2)
        return str(refusal.value)

    for line in on_ranks(2, train):
        assert "would have callbacks.Average.average.model." in line
        assert "of which each rank has a shard; save whole tensors" in line
