"""The callback: same training, same numbers on any number of ranks, a share of the time."""

import csv
import itertools
import random

import pytest
import torch
from lightning import Callback

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.tasks import during
from lockstep_gpt.extras.tasks import rows as of_rows
from lockstep_gpt.extras.tasks.during import Tasks, measure_tasks
from lockstep_gpt.extras.tasks.examples import read_tasks
from lockstep_gpt.extras.tasks.results import numbers_of
from lockstep_gpt.extras.tasks.rows import tokenize_task
from lockstep_gpt.extras.tasks.scoring import evaluating, score_rows
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.run.metrics_file import MetricsFile

SHORT = [{"context": text, "target": text[0]} for text in ("abab", "0101", "xyzx")]
STOPPED = [
    {"context": "ab", "target": "a", "until": "\n"},
    {"context": "0", "target": "1", "until": "x"},
]
PICK = [{"context": "aba", "choices": ["b", "cd", "ee"], "answer": 0} for _ in range(5)]


@pytest.fixture
def short(write):
    """Files of each kind whose texts fit the context of a miniature."""
    pairs = [("fill.jsonl", SHORT), ("stop.jsonl", STOPPED), ("pick.jsonl", PICK)]
    return [str(write(name, lines)) for name, lines in pairs]


@pytest.fixture
def fit(new_run, tmp_path):
    """Train a miniature with callbacks; return its module and the rows of metrics.csv."""

    def train(*callbacks, **settings):
        run = new_run(model={"dropout": 0.1}, **settings)
        path = tmp_path / "metrics.csv"
        path.unlink(missing_ok=True)
        file = MetricsFile(path, ["trainer/step"])
        file.truncate_after(0)
        metrics = Metrics(run.config.log_every, run.batch.tokens_per_step)
        run.fit(metrics, *callbacks, logger=file)
        with path.open() as lines:
            rows = {int(row["trainer/step"]): row for row in csv.DictReader(lines)}
        return run.module, rows

    return train


def test_training_is_the_same_to_the_bit_with_and_without_tasks(fit, short):
    plain, _ = fit()
    tasks = Tasks(every=1, share=None, files=short)
    module, rows = fit(tasks)
    for name, weight in plain.state_dict().items():
        assert torch.equal(module.state_dict()[name], weight), name
    assert all(part.training for part in module.model.modules())
    assert all(rows[step]["tasks/pick"] for step in range(1, 7))


def test_no_random_number_is_drawn(fit, short):
    states = []

    class Around(Tasks):
        def _measure(self, *arguments):
            states.append((random.getstate(), torch.get_rng_state().tolist()))
            row = super()._measure(*arguments)
            states.append((random.getstate(), torch.get_rng_state().tolist()))
            return row

    fit(Around(every=3, share=None, files=short))
    assert len(states) == 4
    assert states[0] == states[1]
    assert states[2] == states[3]


def test_rows_have_the_numbers_of_all_examples_at_the_steps_that_are_due(fit, short):
    module, rows = fit(Tasks(every=4, share=None, files=short), max_steps=6)
    columns = [name for name in rows[6] if name.startswith("tasks/")]
    assert sorted(columns) == [
        "tasks/fill",
        "tasks/fill_perplexity",
        "tasks/pick",
        "tasks/pick_acc_norm",
        "tasks/stop",
    ]
    assert [step for step, row in rows.items() if row["tasks/fill"]] == [4, 6]
    for task in read_tasks(short):
        ready = tokenize_task(task.in_fixed_order(), module.tokenizer, 8)
        flat = [row for example in ready.rows for row in example]
        with evaluating(module.model):
            table = score_rows(module.model, flat, module.tokenizer)
        numbers = [*numbers_of(ready, len(ready.rows), table).values()]
        assert float(rows[6][f"tasks/{task.name}"]) == numbers[0].value


def test_a_run_that_ends_early_is_measured_before_it_ends(fit, short):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_arguments):
            trainer.should_stop = trainer.global_step == 3

    _, rows = fit(Tasks(every=100, share=None, files=short), Stop())
    assert [step for step, row in rows.items() if row["tasks/fill"]] == [3]


def test_a_run_that_ends_early_at_a_measured_step_is_measured_as_at_the_end(
    fit, short, monkeypatch
):
    used = []

    def noted(trainer, module, tasks, counts):
        used.append(sum(counts))
        return measure_tasks(trainer, module, tasks, counts)

    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_arguments):
            trainer.should_stop = trainer.global_step == 4

    monkeypatch.setattr(during, "measure_tasks", noted)
    _, rows = fit(Tasks(every=2, share=0.5, files=short), Stop())
    assert [step for step, row in rows.items() if row["tasks/fill"]] == [2, 4]
    assert len(used) == 3  # at 2, at 4, and with more examples again at 4
    assert used[0] == used[1] < used[2]


def test_the_summary_of_a_resumed_run_has_the_values_from_before_it_stopped(fit, short):
    tasks = Tasks(every=2, share=None, files=short)
    fit(tasks)
    resumed = Tasks(every=2, share=None, files=short)
    resumed.load_state_dict(tasks.state_dict())
    values = tasks.in_summary(6)
    assert resumed.in_summary(6) == {**values, "tasks_seconds": 0.0}
    assert "tasks/fill" in values


def test_other_callbacks_can_monitor_a_task(fit, short):
    seen = {}

    class Watch(Callback):
        def on_validation_end(self, trainer, _module):
            seen[trainer.global_step] = float(trainer.callback_metrics["tasks/fill_perplexity"])

    _, rows = fit(Tasks(every=3, share=None, files=short), Watch())
    assert seen == {
        step: pytest.approx(float(rows[step]["tasks/fill_perplexity"])) for step in (3, 6)
    }


def test_the_share_decides_how_many_examples_and_no_clock_does(fit, short, monkeypatch):
    used = []

    def noted(trainer, module, tasks, counts):
        used.append(counts)
        return measure_tasks(trainer, module, tasks, counts)

    monkeypatch.setattr(during, "measure_tasks", noted)
    settings = {"every": 2, "share": 0.5, "files": short}
    fit(Tasks(**settings))
    first = [*used]
    used.clear()
    hours = itertools.count(0, 3600.0)
    monkeypatch.setattr(during.time, "perf_counter", lambda: next(hours))
    fit(Tasks(**settings))
    assert used == first
    assert 0 < sum(first[0]) <= sum(first[-1]) == 10
    costs = [2 * 32 * 2.5 * 0.25, 6 * 32 * 2.5 * 0.25]  # tokens that half of the share affords
    tasks = [tokenize_task(task.in_fixed_order(), ByteTokenizer(), 8) for task in read_tasks(short)]
    for counts, most in zip((first[0], first[-1]), costs, strict=True):
        assert sum(task.cost(count) for task, count in zip(tasks, counts, strict=True)) <= most


def test_the_clock_of_training_leaves_out_the_tasks(fit, short, monkeypatch):
    slow = 0.2

    def slowly(*arguments):
        during.time.sleep(slow)
        return measure_tasks(*arguments)

    monkeypatch.setattr(during, "measure_tasks", slowly)
    tasks = Tasks(every=1, share=None, files=short)
    _, rows = fit(tasks)
    assert tasks.seconds > 6 * slow
    assert all(
        float(row["throughput/step_seconds"]) < slow for row in rows.values() if row["train/loss"]
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_bits_of_one(on_ranks, model, files, monkeypatch, ranks):
    monkeypatch.setattr(of_rows, "BATCH_TOKENS", 150)  # several batches for each rank
    tasks = [tokenize_task(task, ByteTokenizer(), 64) for task in read_tasks(files)]
    counts = [len(task.rows) for task in tasks]

    class Trainer:
        strategy = None

        def __init__(self, rank, size):
            self.global_rank, self.world_size = rank, size
            self.precision_plugin = self

        def forward_context(self):
            return torch.autocast("cpu", torch.bfloat16)

    class Module:
        tokenizer, device = ByteTokenizer(), torch.device("cpu")

    Module.model = model

    def numbers(rank, size):
        torch.set_num_threads(1)
        tables = measure_tasks(Trainer(rank, size), Module, tasks, counts)
        results = [numbers_of(*task) for task in zip(tasks, counts, tables, strict=True)]
        return [table.tolist() for table in tables], [str(result) for result in results]

    (alone,) = on_ranks(1, lambda rank: numbers(rank, 1))
    assert on_ranks(ranks, lambda rank: numbers(rank, ranks)) == [alone] * ranks
