"""In a mixture with `packing=documents`, each source is packed by itself."""

import csv
import re
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from lockstep.functional import IGNORE
from lockstep.mixtures.mixture import Mixture
from lockstep.mixtures.whole_documents import WholeDocuments
from lockstep.tokens.shards import load_index
from lockstep.tokens.sources.text import Text
from lockstep.tokens.windows import first_windows, read_windows

TEXT = f"{Text.__module__}.{Text.__name__}"
B, SEED = 4, 5
LETTERS = {"code": "xyz", "poems": "aeiou", "prose": "klmnop"}
FILES = {"code": 150, "poems": 40, "prose": 90}


def write(folder, name):
    """Write short documents of a source's letters, some of them empty or longer than a window."""
    draw = np.random.default_rng(len(LETTERS[name]))
    (folder / name).mkdir()
    for number in range(FILES[name]):
        text = draw.choice([*LETTERS[name]], number % 45)
        (folder / name / f"{number}.txt").write_text("".join(text))
    return str(folder / name)


@pytest.fixture
def sources(tmp_path):
    """Return each source's settings."""
    return {name: {"path": write(tmp_path, name), "val_fraction": 0.3} for name in LETTERS}


@pytest.fixture
def mixed(sources, tmp_path):
    """Return the settings of a mixture."""
    weights = {"code": 0.5, "poems": 0.2, "prose": 0.3}
    settings = {"root": str(tmp_path / "data"), "weights": weights}
    return Mixture(sources={name: Text(**values) for name, values in sources.items()}, **settings)


@pytest.fixture
def alone(sources, tmp_path):
    """Return each source by itself."""
    root = str(tmp_path / "data")
    return {
        name: Text(
            **{
                **settings,
                "root": root,
            }
        )
        for name, settings in sources.items()
    }


@pytest.fixture
def packed(module_of):
    """Return the data module of a source on a rank, with windows of whole documents."""
    return partial(module_of, packing=WholeDocuments())


def batches_of(module, feed, count=None):
    """Return tokens and targets of a feed's first batches, or of all, (N, 2, T)."""
    module.trainer.validating = count is None
    pairs = [module.on_after_batch_transfer(stored, 0) for stored in islice(feed, count)]
    tokens, targets = map(torch.cat, zip(*pairs, strict=True))
    return torch.stack([tokens, targets], 1)


def windows_of(module, split):
    """Return all windows of a split, in the order of their numbers."""
    windows = module.windows[split]
    return torch.stack(read_windows(windows, range(len(windows))), 1)


def numbers_of(module, data, count):
    """Return the windows of a run's first positions."""
    return data.order(module.windows["train"].counts, 100 * B, 16, SEED)(np.arange(count))


def sources_of(module, split, numbers):
    """Return the name of the source of each window."""
    counts = module.windows[split].counts
    places = np.searchsorted(first_windows(counts), numbers, "right") - 1
    return [[*counts][place] for place in places]


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_windows_are_those_of_each_source_packed_alone(split, mixed, alone, packed):
    expected = [windows_of(packed(source), split) for source in alone.values()]
    module = packed(mixed)
    assert torch.equal(windows_of(module, split), torch.cat(expected))
    assert [*module.windows[split].counts.values()] == [*map(len, expected)]


def test_batches_interleave_them_by_the_exact_shares(mixed, packed):
    module = packed(mixed)
    numbers = numbers_of(module, mixed, 25 * B)
    batches = batches_of(module, module.train_dataloader(), 25)
    assert torch.equal(batches, windows_of(module, "train")[numbers])
    names = sources_of(module, "train", numbers)
    assert {name: names.count(name) for name in LETTERS} == {"code": 50, "poems": 20, "prose": 30}
    for name, (tokens, _) in zip(names, batches, strict=True):
        assert {*map(chr, tokens.tolist())} <= {*LETTERS[name], "\0", "\1"}


def test_an_epoch_has_each_packed_window_once(mixed, packed):
    module = packed(mixed)
    numbers = numbers_of(module, mixed, 5 * sum(FILES.values()))
    first = 0
    for size in module.windows["train"].counts.values():
        of_source = numbers[(numbers >= first) & (numbers < first + size)]
        assert sorted(of_source[:size].tolist()) == [*range(first, first + size)]
        first += size


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_and_a_resume_take_the_same_windows(world, mixed, packed):
    module = packed(mixed)
    expected = batches_of(module, module.train_dataloader(), 8 * world)
    ranks = [packed(mixed, rank, world, samples=2 * world * B) for rank in range(world)]
    batches_of_ranks = [
        batches_of(module, module.train_dataloader(), 6).split(B) for module in ranks
    ]
    steps = [batch for step in zip(*batches_of_ranks, strict=True) for batch in step]
    assert torch.equal(torch.cat(steps), expected[2 * world * B :])


@pytest.mark.parametrize("world", [1, 2])
def test_validation_counts_each_held_out_target_of_each_source_once(world, mixed, packed):
    modules = [packed(mixed, rank, world) for rank in range(world)]
    index = load_index(modules[0].prepared.folder)
    for place, name in enumerate(modules[0].validated):
        loaders = [module.val_dataloader().loaders[place] for module in modules]
        pairs = zip(modules, loaders, strict=True)
        batches = torch.cat([batches_of(module, loader) for module, loader in pairs])
        counted = int((batches[:, 1] != IGNORE).sum())
        assert counted == index.splits[f"{name}/val"].tokens - 1


def words_of(command):
    """Return the settings of a run on a packed mixture of two sources."""
    words = ["data=mixture", f"data.root={command.folder}/data", "packing=documents"]
    for name, weight in (("code", 0.7), ("prose", 0.3)):
        path = command.folder / name
        source_path = path if path.exists() else write(command.folder, name)
        words += [
            f"+source@data.source.sources.{name}=text",
            f"data.source.sources.{name}.path={source_path}",
        ]
        words += [
            f"data.source.sources.{name}.val_fraction=0.3",
            f"+data.source.weights.{name}={weight}",
        ]
    sizes = ["batch.global_size=6", "batch.micro_size=1", "checkpoint.every=5", "model.n_layer=1"]
    return [*words, *sizes, "callbacks=[default,sources,documents]"]


def rows(run):
    with (run / "metrics.csv").open() as file:
        return [
            {name: row[name] for name in row if "loss" in name or "data/tokens" in name}
            for row in csv.DictReader(file)
        ]


@pytest.mark.slow
def test_a_killed_run_on_ranks_restarts_to_the_same_bits(command, train_and_kill):
    ranks = ("trainer=cpu", "strategy=ddp", "strategy.process_group_backend=gloo")
    words = [*words_of(command), *ranks, "trainer.devices=2"]
    output = command.train(*words, "run_dir=whole").stdout
    packing = r"packing    code: \d+ documents in \d+ windows, .* no token lost; prose: \d+ docu"
    assert re.search(packing, output)
    output = train_and_kill(*words, "run_dir=hit")
    assert "rank 1 was killed by SIGKILL; restarting" in output.stderr
    runs = [command.folder / name for name in ("whole", "hit")]
    uninterrupted, killed = (
        torch.load(run / "checkpoints/step=000020.ckpt")["state_dict"] for run in runs
    )
    assert all(torch.equal(uninterrupted[name], killed[name]) for name in uninterrupted)
    one, other = map(rows, runs)
    assert one[2:] == other[2:]
    assert float(one[-1]["val/loss/code"]) > 0
