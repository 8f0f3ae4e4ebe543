"""The callback: same training, same numbers on any number of ranks, a share of the time."""

import csv
import itertools
import json
import random
import re
from importlib.util import find_spec

import pytest
import torch
from lightning import Callback

from lockstep_gpt.config import UserError
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.tasks import during
from lockstep_gpt.extras.tasks import rows as of_rows
from lockstep_gpt.extras.tasks.during import Tasks, measured
from lockstep_gpt.extras.tasks.examples import read_tasks
from lockstep_gpt.extras.tasks.results import numbers_of
from lockstep_gpt.extras.tasks.rows import tokenized
from lockstep_gpt.extras.tasks.scoring import evaluating, scored
from lockstep_gpt.runtime.callbacks.metrics import Metrics
from lockstep_gpt.runtime.metrics_file import MetricsFile

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
        file.begin(0)
        metrics = Metrics(run.config.log_every, run.batch.tokens_per_step)
        run.fit(metrics, *callbacks, logger=file)
        with path.open() as lines:
            rows = {int(row["trainer/step"]): row for row in csv.DictReader(lines)}
        return run.module, rows

    return train


def test_training_is_the_same_to_the_bit_with_and_without_tasks(fit, short):
    plain, _ = fit()
    after = random.random(), torch.rand(1)
    tasks = Tasks(every=1, share=None, files=short)
    module, rows = fit(tasks)
    assert (random.random(), torch.rand(1)) != after  # both drew from the same state before
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
    own = [name for name in rows[6] if name.startswith("tasks/")]
    assert sorted(own) == [
        "tasks/fill",
        "tasks/fill_perplexity",
        "tasks/pick",
        "tasks/pick_acc_norm",
        "tasks/stop",
    ]
    assert [step for step, row in rows.items() if row["tasks/fill"]] == [4, 6]
    for task in read_tasks(short):
        ready = tokenized(task.in_fixed_order(), module.tokenizer, 8)
        flat = [row for each in ready.rows for row in each]
        with evaluating(module.model):
            table = scored(module.model, flat, module.tokenizer)
        found = [*numbers_of(ready, len(ready.rows), table).values()]
        assert float(rows[6][f"tasks/{task.name}"]) == found[0].value


def test_a_run_that_ends_early_is_measured_before_it_ends(fit, short):
    class Stop(Callback):
        def on_train_batch_end(self, trainer, *_arguments):
            trainer.should_stop = trainer.global_step == 3

    _, rows = fit(Tasks(every=100, share=None, files=short), Stop())
    assert [step for step, row in rows.items() if row["tasks/fill"]] == [3]


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
        return measured(trainer, module, tasks, counts)

    monkeypatch.setattr(during, "measured", noted)
    settings = {"every": 2, "share": 0.5, "files": short}
    fit(Tasks(**settings))
    first = [*used]
    used.clear()
    hours = itertools.count(0, 3600.0)
    monkeypatch.setattr(during.time, "perf_counter", lambda: next(hours))
    fit(Tasks(**settings))
    assert used == first
    assert 0 < sum(first[0]) <= sum(first[-1]) == 10
    costs = [2 * 32 * 3 * 0.25, 6 * 32 * 3 * 0.25]  # tokens that half of the share affords
    task = [tokenized(each.in_fixed_order(), ByteTokenizer(), 8) for each in read_tasks(short)]
    for counts, most in zip((first[0], first[-1]), costs, strict=True):
        assert sum(each.cost(count) for each, count in zip(task, counts, strict=True)) <= most


def test_the_clock_of_training_leaves_out_the_tasks(fit, short, monkeypatch):
    slow = 0.2

    def slowly(*arguments):
        during.time.sleep(slow)
        return measured(*arguments)

    monkeypatch.setattr(during, "measured", slowly)
    tasks = Tasks(every=1, share=None, files=short)
    _, rows = fit(tasks)
    assert tasks.seconds > 6 * slow
    assert all(
        float(row["throughput/step_seconds"]) < slow for row in rows.values() if row["train/loss"]
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_bits_of_one(on_ranks, model, files, monkeypatch, ranks):
    monkeypatch.setattr(of_rows, "BATCH_TOKENS", 150)  # several batches for each rank
    tasks = [tokenized(task, ByteTokenizer(), 64) for task in read_tasks(files)]
    counts = [len(each.rows) for each in tasks]

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
        tables = measured(Trainer(rank, size), Module, tasks, counts)
        found = [numbers_of(*each) for each in zip(tasks, counts, tables, strict=True)]
        return [table.tolist() for table in tables], [str(each) for each in found]

    (alone,) = on_ranks(1, lambda rank: numbers(rank, 1))
    assert on_ranks(ranks, lambda rank: numbers(rank, ranks)) == [alone] * ranks


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("every=0", "callbacks.tasks.every=0 must be a whole number of at least 1"),
        ("every=x", "callbacks.tasks.every=x must be a whole number of at least 1"),
        ("share=0", "callbacks.tasks.share=0 must be above 0 and at most 1, or null for no limit"),
        ("share=2%", "callbacks.tasks.share=2% must be above 0 and at most 1, or null"),
        ("files=[]", "callbacks.tasks.files=[] must be a list; for example [builtin]"),
        ("files=x.jsonl", "callbacks.tasks.files=x.jsonl must be a list; for example [builtin]"),
        ("files=[x.jsonl]", "x.jsonl cannot be read: No such file or directory; name a task file"),
        ("evry=1", "evry"),
    ],
)
def test_a_bad_setting_is_one_line_before_anything_is_created(command, setting, said):
    words = ("callbacks=[default,tasks]", f"callbacks.tasks.{setting}", "run_dir=run")
    err = command(*command.smoke(*words), status=2).stderr
    assert said in err
    assert "Traceback" not in err
    assert not (command.folder / "run").exists()


def test_the_constructor_refuses_the_same():
    with pytest.raises(UserError, match=r"callbacks.tasks.every=0 must be a whole number"):
        Tasks(every=0)


def test_a_text_too_long_for_the_model_ends_the_run_before_its_first_step(command, write):
    path = write("long.jsonl", [{"context": "a", "target": "b" * 40}])
    words = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{path}]", "run_dir=run")
    result = command.train(*words, status=2)
    assert f"{path}:1: 40 tokens to score are more than model.block_size=32" in result.stderr
    assert "Traceback" not in result.stderr
    assert not [*(command.folder / "run").glob("checkpoints/*.ckpt")]


@pytest.mark.long
def test_a_run_with_tasks_shows_them_everywhere(command, write, read_offline):
    path = write("own.jsonl", PICK)
    own = (f"callbacks.tasks.files=[builtin,{path}]", "callbacks.tasks.every=10")
    words = ("callbacks=[default,tasks]", *own, "callbacks.tasks.share=null", "run_dir=run")
    out = command(*command.smoke("logger=wandb", "trainer=cpu", *words)).stdout
    assert "6 tasks with 905 examples: 905 every 10 steps, 905 at the end" in out
    assert re.search(r"^own +5  acc", out, re.MULTILINE)
    assert re.search(r"^tasks took \d+\.\d s of \d+ s$", out, re.MULTILINE)
    with (command.folder / "run/metrics.csv").open() as lines:
        rows = {int(row["trainer/step"]): row for row in csv.DictReader(lines)}
    summary = command.summary("run")
    assert all(0 <= float(rows[step]["tasks/lines"]) <= 1 for step in (10, 20))
    assert summary["tasks/lines"] == float(rows[20]["tasks/lines"])
    assert summary["tasks_seconds"] > 0
    _, _, logged = read_offline(command.folder / "run")
    shown = {row["trainer/step"]: row["tasks/own"] for row in logged if "tasks/own" in row}
    assert shown == {step: float(rows[step]["tasks/own"]) for step in (10, 20)}
    scores = json.loads(command("score", "run", "--json", "--tasks", str(path)).stdout)
    assert scores["tasks"]["own"]["acc"] == pytest.approx(float(rows[20]["tasks/own"]))
    if find_spec("lockstep_gpt.extras.seeing") is None:
        pytest.skip("no such extra: seeing")
    assert '"tasks/lines"' in (command.folder / "run/report.html").read_text()


@pytest.mark.long
def test_two_ranks_write_the_numbers_of_one(command, write):
    if find_spec("lockstep_gpt.extras.exact") is None:
        pytest.skip("no such extra: exact")
    path = write("own.jsonl", [{"context": f"{n}", "target": f"{n}"[0]} for n in range(40)])
    own = (
        "callbacks=[default,tasks]",
        f"callbacks.tasks.files=[{path}]",
        "callbacks.tasks.every=5",
    )
    words = (*own, "callbacks.tasks.share=null", "batch.exact_micro_size=4", "trainer=cpu")
    tables = []
    for ranks in (1, 2):
        strategy = ("strategy=ddp", f"trainer.devices={ranks}") if ranks > 1 else ()
        command(*command.smoke(*words, *strategy, f"run_dir={ranks}"))
        with (command.folder / f"{ranks}/metrics.csv").open() as lines:
            tables.append(
                [[row[name] for name in row if "tasks/" in name] for row in csv.DictReader(lines)]
            )
    assert tables[0] == tables[1]
    assert any(any(row) for row in tables[0])


@pytest.mark.long
def test_sharded_weights_are_measured_as_a_whole(command, files):
    if find_spec("lockstep_gpt.extras.sharding") is None:
        pytest.skip("no such extra: fsdp2")
    own = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{files[1]}]")
    words = (*own, "callbacks.tasks.share=null", "trainer=cpu", "trainer.devices=2")
    command(*command.smoke(*words, "strategy=fsdp2", "run_dir=run"))
    summary = command.summary("run")
    scores = json.loads(command("score", "run", "--json", "--tasks", files[1]).stdout)
    assert summary["tasks/fill"] == scores["tasks"]["fill"]["acc"]
    likelihood = scores["tasks"]["fill"]["perplexity"]
    assert summary["tasks/fill_perplexity"] == pytest.approx(likelihood, rel=1e-4)


@pytest.mark.long
def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(command, files):
    own = ("callbacks=[default,tasks]", f"callbacks.tasks.files=[{files[1]}]")
    words = (*own, "callbacks.tasks.every=5", "callbacks.tasks.share=0.5", "trainer=cpu")
    command(*command.smoke(*words, "optim.decay=constant", "run_dir=once"))
    command(*command.smoke(*words, "optim.decay=constant", "run_dir=other", "max_steps=10"))
    command("train", "run_dir=other", "resume=auto", "max_steps=20")
    tables = []
    for run in ("once", "other"):
        with (command.folder / run / "metrics.csv").open() as lines:
            rows = {
                row["trainer/step"]: row["tasks/fill_perplexity"] for row in csv.DictReader(lines)
            }
        tables.append({step: rows[step] for step in ("5", "15", "20")})
    assert tables[0] == tables[1]
