import copy
import csv
import itertools
import json
import re
import shutil
from pathlib import Path

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lockstep_gpt.data import Tokens
from lockstep_gpt.module import count_targets

from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.callbacks.counted_targets import CountTargets
from lockstep.errors import UserError
from lockstep.functional import IGNORE
from lockstep.metrics.file import MetricsFile
from lockstep.pages.recordings import read_recordings
from lockstep.pages.sync_panel import SyncPanel
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.placing import ddp

ON_TWO = [
    "trainer=cpu",
    "trainer.devices=2",
    "strategy=ddp",
    "strategy.process_group_backend=gloo",
]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoints/step=000020.ckpt", weights_only=True)["state_dict"]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def is_mean_of_ranks(parameter):
    """Tell whether the average is the sum of two float32 halves."""
    before, after = (np.array(parameter[name], "float32") for name in ("before", "after"))
    halves = before * np.float32(0.5)
    return len(before) == 2 and np.array_equal(after, halves[0] + halves[1])


def test_the_first_step_and_every_so_many_are_recorded(recordings):
    assert [recording["step"] for recording in recordings] == [1, 3, 6, 9, 12, 15, 18]


def test_a_recorded_run_ends_with_the_bits_of_one_that_was_not(two, recorded):
    assert same(weights(two[0].folder / "runs/two"), weights(recorded[0]))


def test_the_recorded_average_is_the_mean_over_ranks(recordings):
    parameters = [parameter for recording in recordings for parameter in recording["parameters"]]
    assert all(map(is_mean_of_ranks, parameters))
    gradients = [parameter["before"] for parameter in parameters]
    assert sum(first != second for first, second in gradients) > 0.9 * len(gradients)


# Two ranks would compile the same code at once, for most of a minute.
STAND_IN = """
import functools, lightning
class StandIn(lightning.Callback):
    def setup(self, trainer, pl_module, stage):
        model = pl_module.model
        model.compile = functools.partial(model.compile, backend="aot_eager")
"""


@pytest.mark.slow
def test_bf16_compiled_and_accumulated_steps_are_recorded(command, record_compiled):
    (command.folder / "stand_in.py").write_text(STAND_IN)
    words = [*ON_TWO, "+callbacks.stand_in._target_=stand_in.StandIn"]
    recordings = record_compiled(*words, PYTHONPATH=str(command.folder))
    assert all(map(is_mean_of_ranks, recordings[-1]["parameters"]))


def test_ranks_are_compared_and_are_equal_afterwards(recordings):
    assert {recording["spread"] for recording in recordings} == {0.0}


def test_recorded_norms_are_those_of_the_log(recorded, recordings):
    with (recorded[0] / "metrics.csv").open() as file:
        rows = {int(row["trainer/step"]): row for row in csv.DictReader(file)}
    norm = np.linalg.norm([recording["mean_norm"] for recording in recordings[5]["parameters"]])
    assert norm == pytest.approx(float(rows[15]["optim/grad_norm"]), rel=1e-5)
    logged = [float(rows[recording["step"]]["sync/noise_scale"]) for recording in recordings[1:]]
    assert logged == [recording["noise_scale"] for recording in recordings[1:]]


def test_each_rank_records_its_own_samples(recordings):
    texts = [text for recording in recordings for rank in recording["samples"] for text in rank]
    assert len(texts) == len(set(texts)) == 7 * 2 * 2
    assert all(len(text.encode()) >= 32 for text in texts)  # the smoke experiment's context


def test_the_screen_ends_with_advice_and_the_command_that_shows_more(recorded):
    _, screen = recorded
    advice = re.search(r"^gradient noise scale: .* a step has 8.*$", screen, re.MULTILINE)
    assert advice
    assert advice.start() < screen.index("panel runs/recorded") < screen.index("done in")


@pytest.mark.slow
def test_a_resumed_run_repeats_recordings_and_noise_scale_to_the_bit(recorded, command):
    run = command.folder / "again"
    shutil.copytree(recorded[0], run)
    last = json.loads((run / "sync/step=000018.json").read_text())
    for path in [*run.glob("checkpoints/step=000020*"), *run.glob("sync/step=00001[258]*")]:
        path.unlink()
    (run / ".saved").unlink()  # with it, a run never starts over
    (run / "summary.json").unlink()
    command("train", f"run_dir={run}", "resume=auto")
    assert same(weights(recorded[0]), weights(run))
    assert json.loads((run / "sync/step=000018.json").read_text()) == last


def test_one_rank_s_micro_batches_stand_for_ranks_and_its_weights_stay(fitted, tmp_path):
    plain = fitted().state_dict()
    panel = SyncPanel(every=2, samples=3, sample_tokens=5)
    watched = fitted(panel).state_dict()
    assert same(plain, watched)
    recordings = read_recordings(tmp_path)
    assert [recording["step"] for recording in recordings] == [1, 2, 4, 6]
    for recording in recordings:
        assert recording["ranks"] == 1
        assert recording["accumulation"] == 2
        assert recording["advice"].startswith("gradient noise scale: ")
    # They come from several micro-batches if needed.
    assert [len(text) for text in recordings[0]["samples"][0]] == [5, 5, 5]
    # What is recorded as updated by the last step are the weights at the end.
    for parameter in recordings[-1]["parameters"]:
        now = (
            watched[parameter["name"].removeprefix("model.")]
            .flatten()[parameter["positions"]]
            .tolist()
        )
        assert np.float32(parameter["updated"]).tolist() == now


def test_files_of_a_long_run_are_few_and_the_last_step_may_be_one():
    panel = SyncPanel(every=50, files=40)
    steps = [step for step in range(1, 100_001) if panel.is_recorded(step)]
    files = [step for step in steps if panel.has_file(step, 100_000)]
    assert len(steps) == 2001
    assert len(files) == 41
    assert files[-1] == 100_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0 must be at least 1"),
        ({"values": 0}, "values=0 must be at least 1"),
        ({"smoothing": 1.0}, "smoothing=1.0 must be below 1"),
    ],
)
def test_a_wrong_setting_is_rejected_by_its_name(settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        SyncPanel(**settings)


def test_compression_with_memory_is_rejected(new_run):
    strategy = ddp(process_group_backend="gloo", timeout_seconds=60, comm_hook="powersgd")
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, devices=1)
    with pytest.raises(UserError, match="comm_hook=powersgd makes approximations"):
        SyncPanel().setup(trainer, new_run().module, "fit")


def test_sums_in_another_order_are_rejected(fitted):
    with pytest.raises(UserError, match=r"but batch\.exact_micro_size adds in another"):
        fitted(SyncPanel(), batch={"exact_micro_size": 2})


def test_strategies_that_shard_gradients_are_rejected(new_run):
    trainer = lightning.Trainer(accelerator="cpu", strategy=ModelParallelStrategy(), devices=1)
    with pytest.raises(UserError, match="not under ModelParallelStrategy; remove it"):
        SyncPanel().setup(trainer, new_run().module, "fit")


COUNTER = """
import collections, json, torch
from lightning import Callback

class Counter(Callback):
    def __init__(self, folder):
        self.folder, self.profile = folder, None

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profile.start()
        if trainer.global_step == 5:
            self.profile.stop()
            names = (event.name for event in self.profile.events())
            # gloo's thread may end the last collective later; c10d:: counts the same ones.
            names = collections.Counter(name for name in names if not name.startswith("gloo:"))
            with open(f"{self.folder}/{trainer.global_rank}.json", "w") as file:
                json.dump(names, file)
"""


def operations(command, *words):
    """Return what each of two ranks does in steps 4 and 5: operations, collectives, allocations.

    Not earlier: DDP rebuilds its buckets once, after the first step that it averaged itself.
    Copies in memory are off: the clock decides in which steps they are made.
    """
    (command.folder / "counter.py").write_text(COUNTER)
    folder = command.folder / "_".join(re.sub(r"\W", "", word) for word in words)
    folder.mkdir()
    counter = ["+callbacks.counter._target_=counter.Counter", f"+callbacks.counter.folder={folder}"]
    run = [f"run_dir={folder}/run", "max_steps=5", "log_every=100", "val_every=5"]
    run += ["schedule.warmup=1", "memory=false"]
    command.train(*ON_TWO, *words, *counter, *run, PYTHONPATH=str(command.folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_unrecorded_steps_do_no_extra_work_on_any_rank(command):
    counts = operations(command, "callbacks=[default,sync_panel]")  # records only step 1
    assert counts == operations(command, "callbacks=default")
    assert counts[0]["aten::empty"] > 0
    assert any("allreduce" in name for name in counts[0])


class SomeTargets(Tokens):
    """Batches of which some targets are `IGNORE`, and in some micro-batches all of them."""

    def on_after_batch_transfer(self, batch, *arguments):
        tokens, targets = super().on_after_batch_transfer(batch, *arguments)
        place = torch.arange(targets.shape[1])
        targets = targets.masked_fill(place < tokens[:, :1] % targets.shape[1], IGNORE)
        targets[tokens[:, 0] % 3 == 0] = IGNORE
        return tokens, targets


class Batches(lightning.Callback):
    """Keeps the batches and the weights of each step."""

    def __init__(self):
        self.steps = {}

    def on_train_batch_start(self, trainer, pl_module, batch, _batch_idx):
        weights = copy.deepcopy(pl_module.model)
        _, batches = self.steps.setdefault(trainer.global_step + 1, (weights, []))
        batches.append(batch)


def gradients_of(model, tokens, targets):
    """Return the gradient of the mean over all targets that count; zeros if there is none."""
    return torch.autograd.grad(model(tokens, targets), [*model.parameters()])


def expected_noise(model, parts):
    """Return signal and noise by their definition, from parts of unequal numbers of targets."""
    counts = [int((targets != IGNORE).sum()) for _, targets in parts]
    samples = sum(len(tokens) for tokens, _ in parts)
    squares = [
        sum(float(each.double().square().sum()) for each in gradients_of(model, *part))
        for part in parts
    ]
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    big = sum(float(each.double().square().sum()) for each in gradients_of(model, *whole))
    # E|g_i|^2 = |G|^2 + trace / b_i, where b_i is the part's share of the samples; weighed by b_i.
    small = sum(count * each for count, each in zip(counts, squares, strict=True)) / sum(counts)
    used = sum(count > 0 for count in counts)
    trace = (small - big) / (used / samples - 1 / samples)
    return big - trace / samples, trace


def record_some_targets(new_run, folder, world_size=1, **place):
    """Record each step of a run whose micro-batches have unequal numbers of targets."""
    size = {"micro_size": 3, "global_size": 12 // world_size, "reference_size": 12 // world_size}
    run = new_run(batch=size, max_steps=4, val_every=100, clip_norm=0.05)
    run.data.__class__ = SomeTargets
    batches, panel = Batches(), SyncPanel(every=1, smoothing=0.0, files=9, values=7)
    file = MetricsFile(folder / "metrics.csv", [])
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        file.log_metrics = lambda *_: None
    else:
        file.truncate_after(0)
    logged = {}

    class Norms(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            clip = next(each for each in trainer.callbacks if isinstance(each, ClipAndSkip))
            if clip.norm is not None:  # after the first step
                logged[trainer.global_step] = float(clip.norm)

    counts = CountTargets(count_targets, typical=24)
    run.fit(counts, panel, batches, Norms(), logger=file, **place)
    return batches.steps, panel.noise, logged


def assert_true(recording, model, parts):
    """Compare a recording with the gradients of all parts together and of each one."""
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    gradients = gradients_of(model, *whole)
    for parameter, gradient in zip(recording["parameters"], gradients, strict=True):
        picked = gradient.flatten()[parameter["positions"]]
        torch.testing.assert_close(torch.tensor(parameter["after"]), picked, rtol=1e-4, atol=1e-7)
        mean = torch.tensor(parameter["before"]).mean(0)
        torch.testing.assert_close(mean, picked, rtol=1e-4, atol=1e-7)
        assert parameter["mean_norm"] == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_gradients_of_unequal_micro_batches_are_those_of_the_optimizer(new_run, tmp_path):
    steps, noise, norms = record_some_targets(new_run, tmp_path)
    recordings = read_recordings(tmp_path)
    assert [recording["step"] for recording in recordings] == [1, 2, 3, 4]
    for recording in recordings:
        model, parts = steps[recording["step"]]
        assert_true(recording, model, parts)
        whole = [torch.cat(each) for each in zip(*parts, strict=True)]
        assert recording["losses"] == pytest.approx([model(*whole).item()], rel=1e-5)
        total = np.linalg.norm([each["mean_norm"] for each in recording["parameters"]])
        assert total == pytest.approx(norms[recording["step"]], rel=1e-5)
    assert (noise.signal, noise.noise) == pytest.approx(expected_noise(*steps[4]), rel=1e-3)


def test_gradients_of_unequal_ranks_are_those_of_the_optimizer(new_run, tmp_path, on_ranks):
    def train(_rank):
        place = {"strategy": DDPStrategy(), "devices": 2, "num_nodes": 1}
        steps, noise, norms = record_some_targets(new_run, tmp_path, 2, **place)
        batches = {
            step: [(tokens.tolist(), targets.tolist()) for tokens, targets in parts]
            for step, (_, parts) in steps.items()
        }
        weights = {step: _as_lists(model) for step, (model, _) in steps.items()}
        return batches, weights, (noise.signal, noise.noise), norms

    results = on_ranks(2, train)
    assert not any(isinstance(result, str) for result in results), results
    model = new_run().module.model
    for recording in read_recordings(tmp_path):
        step = recording["step"]
        for name, weight in model.state_dict().items():
            weight.copy_(torch.tensor(results[0][1][step][name]))
        of_ranks = [
            [
                torch.tensor([*itertools.chain.from_iterable(each)])
                for each in zip(*result[0][step], strict=True)  # its micro-batches together
            ]
            for result in results
        ]
        assert_true(recording, model, of_ranks)
        losses = [model(*part).item() for part in of_ranks]
        assert recording["losses"] == pytest.approx(losses, rel=1e-5)
        total = np.linalg.norm([each["mean_norm"] for each in recording["parameters"]])
        assert total == pytest.approx(results[0][3][step], rel=1e-5)
    assert results[0][2] == results[1][2]
    assert results[0][2] == pytest.approx(expected_noise(model, of_ranks), rel=1e-3)


def _as_lists(model):
    return {name: weight.tolist() for name, weight in model.state_dict().items()}
