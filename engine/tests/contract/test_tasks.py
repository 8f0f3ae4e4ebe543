"""Tasks alone, with a foreign language model and tokenizer."""

import csv
import json
import math
import random
from itertools import islice

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lockstep.callbacks.seeds import MicroBatchSeeds
from lockstep.errors import UserError
from lockstep.evaluation.tasks import Tasks

pytest.importorskip("lm_eval", reason='not installed: pip install "lightning-lockstep[tasks]"')
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # warnings of other libraries
]
LETTERS = "\0abcd \n"
T = 16  # the longest context


class Letters:
    """A foreign tokenizer: one id per letter; 0 ends a text."""

    eos_token_id = 0

    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[each] for each in ids)


class Reader(nn.Module):
    """A foreign language model: a recurrent network."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), 16)
        self.memory = nn.GRU(16, 16, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, len(LETTERS))

    def forward(self, tokens):
        assert not self.training or tokens.shape[1] == T
        hidden, _ = self.memory(self.embedding(tokens))
        return self.head(self.dropout(hidden))


class Language(lightning.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr, self.reader = lr, Reader()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.reader(batch[:, :-1]).mT, batch[:, 1:])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@pytest.fixture
def folder(tmp_path, write_task):
    """Write examples of random words; some are longer than the model's context."""
    draw = random.Random(0)

    def word(longest=6):
        return "".join(draw.choice("abcd ") for _ in range(draw.randint(1, longest)))

    def choices():
        return {"choices": [word(), word(), word()], "answer": draw.randrange(3)}

    contexts = ["", " ", *(word(20) for _ in range(10))]
    picks = [{"context": context, **choices()} for context in contexts]
    write_task(tmp_path / "tasks", "pick", picks)
    write_task(tmp_path / "tasks", "shots", [{**pick, "context": "a"} for pick in picks])
    fills = [{"context": f"{word(20)}d", "target": "a"} for _ in range(20)]
    write_task(tmp_path / "tasks", "fill", fills)
    write_task(tmp_path / "tasks", "roll", [{"target": word(60)} for _ in range(5)])
    answers = [{"context": word(20), "target": end * 6} for end in "abcd "]
    write_task(tmp_path / "tasks", "tell", answers)
    return tmp_path / "tasks"


@pytest.fixture
def fit(foreign, folder):
    """Return a function that trains for 4 steps, with a validation after each second one."""

    def run(names, world_size=1, lr=1e-2, model="reader", **settings):
        random_ids = torch.Generator().manual_seed(0)
        tokens = torch.randint(len(LETTERS), (96, T + 1), generator=random_ids)
        accumulation = 2 // world_size
        order = foreign.StepOrder(foreign.rank(), world_size, accumulation)
        batches = [[each % 96 for each in batch] for batch in islice(order, 4 * accumulation)]
        loaders = (DataLoader(tokens, batch_sampler=batches), DataLoader(tokens, batch_size=96))
        module = foreign.module(of=Language, lr=lr)
        about = {"batch_size": 4, "model": model, "tokenizer": Letters(), "block_size": T}
        tasks = [Tasks(names, str(folder), **about)] if names else []
        foreign.train(
            module,
            MicroBatchSeeds(1),
            *tasks,
            world_size=world_size,
            accumulation=accumulation,
            steps=4,
            exact=True,
            validate_every=2 * accumulation,
            loaders=loaders,
            **settings,
        )
        return module

    return run


def spaces(context):
    """Return how many spaces at the end of a context belong to what follows."""
    return len(context) - len(context.rstrip())


def rows_of(folder):
    """Return the values of tasks in Lightning's CSV file, by row: step -> name -> text."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    found = {}
    for row in rows:
        values = {name: value for name, value in row.items() if "tasks/" in name and value}
        if values:
            found[int(row["step"]) + 1] = values
    return found


ALL = ["pick", "shots", "fill", "roll", "tell"]


def test_values_are_equal_on_one_rank_and_two_and_training_has_the_same_bits_as_without(
    fit, foreign, on_each, tmp_path
):
    def run(names, world_size):
        def train(_rank):
            logger = CSVLogger(tmp_path / f"{len(names)} {world_size}")
            return foreign.digest(fit(names, world_size=world_size, logger=logger))

        return on_each(world_size, train)

    assert len({*run(ALL, 1), *run(ALL, 2), *run([], 1)}) == 1
    one, two = (rows_of(tmp_path / f"{len(ALL)} {world_size}") for world_size in (1, 2))
    assert one == two
    assert [*one] == [2, 4]
    assert {name.split("/")[1] for name in one[2]} == {*ALL}
    assert one[2]["tasks/roll/bits_per_byte"] != one[4]["tasks/roll/bits_per_byte"]


def test_likelihoods_are_those_of_one_text_at_a_time_in_evaluation(fit, folder, tmp_path):
    """The reference has no batches, and cuts the beginning of what is too long."""
    module = fit(["pick", "fill", "roll"], logger=CSVLogger(tmp_path / "log")).eval()
    encode = Letters().encode

    def likelihoods(ids, count):
        ids = torch.tensor(ids)[-T - 1 :]
        with torch.no_grad():
            found = module.reader(ids[None, :-1])[0].double().log_softmax(-1)
        return found.gather(1, ids[1:, None])[-count:, 0], found.argmax(-1)[-count:] == ids[-count:]

    def read(name):
        return [*map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())]

    values = {name: float(value) for name, value in rows_of(tmp_path / "log")[4].items()}
    right, normalized = [], []
    for pick in read("pick"):
        start, scores = ([] if pick["context"].strip() else [0]), []
        for choice in pick["choices"]:
            ids = [*start, *encode(pick["context"] + choice)]
            scores.append(likelihoods(ids, spaces(pick["context"]) + len(choice))[0].sum().item())
        lengths = [*map(len, pick["choices"])]
        best = max(range(3), key=lambda at: scores[at])
        longer = max(range(3), key=lambda at: scores[at] / lengths[at])
        right.append(best == pick["answer"])
        normalized.append(longer == pick["answer"])
    assert values["tasks/pick/acc"] == sum(right) / len(right)
    assert values["tasks/pick/acc_norm"] == sum(normalized) / len(normalized)
    found = [likelihoods(encode(line["context"] + "a"), 1)[1].item() for line in read("fill")]
    assert values["tasks/fill/acc"] == sum(found) / len(found)
    bits, size = 0.0, 0
    for line in read("roll"):
        ids = [0, *encode(line["target"])]
        for first in range(1, len(ids), T):
            count = len(ids[first : first + T])
            bits -= likelihoods(ids[: first + count], count)[0].sum().item() / math.log(2)
        size += len(line["target"])
    assert values["tasks/roll/bits_per_byte"] == pytest.approx(bits / size, rel=1e-6)


def test_answers_are_the_likeliest_tokens_up_to_a_stop(fit, folder, tmp_path, write_task):
    """A task whose targets are the model's own answers is solved, all of it."""
    untrained = fit([], lr=0.0).eval()
    letters, contexts, targets = Letters(), ["a", "dcb", "b" * 30], []
    for context in contexts:
        ids = letters.encode(context)[6 - T :]
        new = []
        with torch.no_grad():
            while len(new) < 6 and not {0, letters.encode("b")[0]} & {*new}:
                new.append(untrained.reader(torch.tensor([ids + new]))[0, -1].argmax().item())
        targets.append(letters.decode(new).partition("b")[0].partition("\0")[0])
    rows = [{"context": a, "target": b} for a, b in zip(contexts, targets, strict=True)]
    assert any(targets)
    write_task(folder, "tell", [*rows, {"context": "a", "target": "zzz"}])
    fit(["tell"], lr=0.0, logger=CSVLogger(tmp_path / "log"))
    assert rows_of(tmp_path / "log")[4]["tasks/tell/exact_match"] == "0.75"


def test_equal_weights_have_equal_values(fit, tmp_path):
    """Also where each prompt has examples, which are drawn."""
    fit(ALL, lr=0.0, logger=CSVLogger(tmp_path / "log"))
    first, second = rows_of(tmp_path / "log").values()
    assert first == second


@pytest.mark.parametrize(
    ("mistake", "rule"),
    [
        ({"names": ["nothing"]}, r"^tasks=nothing: .*; `lm-eval ls tasks` lists the names"),
        ({"names": ["fill"], "model": "writer"}, "writer.*; set model= to the module's attribute"),
    ],
)
def test_a_mistake_ends_a_run_before_its_first_step(fit, mistake, rule):
    with pytest.raises(UserError, match=rule):
        fit(**mistake)
