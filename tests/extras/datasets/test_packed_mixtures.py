"""In a mixture with `data.packing=documents`, each source is packed by itself."""

import csv
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lockstep_gpt.config import UserError, data_sources
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import load_index
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.registry import additions, asked

pytestmark = pytest.mark.skipif(
    not [*additions("WINDOWS_OF_SOURCES")], reason="no such extra: documents"
)
T, B, SEED = 16, 4, 5
LETTERS = {"code": "xyz", "poems": "aeiou", "prose": "klmnop"}
FILES = {"code": 150, "poems": 40, "prose": 90}
PACKED = {"packing": "documents"}


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
    return {
        name: {"source": "text", "path": write(tmp_path, name), "val_fraction": 0.3}
        for name in LETTERS
    }


@pytest.fixture
def mixed(sources, tmp_path):
    """Return the settings of a packed mixture."""
    weights = {"code": 0.5, "poems": 0.2, "prose": 0.3}
    own = {"root": str(tmp_path / "data"), "sources": sources, "weights": weights, **PACKED}
    return data_sources()["mixture"](**own)


@pytest.fixture
def alone(sources, tmp_path):
    """Return the settings of each source by itself, packed."""
    root = str(tmp_path / "data")
    return {
        name: data_sources()["text"](root=root, **own, **PACKED) for name, own in sources.items()
    }


def module_of(data, rank=0, world=1, samples=0, **changes):
    """Return one rank's data module, as after a resume at so many samples."""
    shape = {"block_size": T, "micro_size": B, "accumulation": 1, "seed": SEED, **changes}
    folder = prepare(data)
    config = SimpleNamespace(data=data, model=SimpleNamespace(block_size=T))
    asked("PREPARED", folder, config)
    (make,) = filter(None, asked("DATA_MODULE", data))
    module = make(folder, **shape)
    device = SimpleNamespace(root_device=SimpleNamespace(type="cpu"))
    places = {"global_rank": rank, "world_size": world, "global_step": 0, "max_steps": 100}
    module.trainer = SimpleNamespace(strategy=device, **places)
    module.resume_at(0, samples)
    return module


def batches_of(module, feed, count=None):
    """Return tokens and targets of a feed's first batches, or of all, (N, T)."""
    made = (each for each, _ in zip(feed, range(count or 10**6), strict=False))
    pairs = [module.on_after_batch_transfer(each, 0) for each in made]
    tokens, targets = map(torch.cat, zip(*pairs, strict=True))
    return torch.stack([tokens, targets], 1)


def windows_of(module, split):
    """Return all windows of a split, in the order of their numbers."""
    count = module.train_windows if split == "train" else module.val_windows_held_out
    return batches_of(module, module.feed(split, lambda *_: [np.arange(count)]))


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_windows_are_those_of_each_source_packed_alone(split, mixed, alone):
    expected = [windows_of(module_of(own), split) for own in alone.values()]
    module = module_of(mixed)
    assert torch.equal(windows_of(module, split), torch.cat(expected))
    assert [*module.sizes[split].values()] == [*map(len, expected)]


def test_batches_interleave_them_by_the_exact_shares(mixed):
    module = module_of(mixed)
    numbers = module.order.windows(np.arange(25 * B), 0, SEED)
    batches = batches_of(module, module.train_dataloader(), 25)
    assert torch.equal(batches, windows_of(module, "train")[numbers])
    names = module.sources_of("train", numbers)
    assert {name: names.count(name) for name in LETTERS} == {"code": 50, "poems": 20, "prose": 30}
    for name, (tokens, _) in zip(names, batches, strict=True):
        assert {*map(chr, tokens.tolist())} <= {*LETTERS[name], "\0", "\1"}


def test_an_epoch_has_each_packed_window_once(mixed):
    module = module_of(mixed)
    numbers = module.order.windows(np.arange(5 * sum(FILES.values())), 0, SEED)
    first = 0
    for size in module.sizes["train"].values():
        own = numbers[(numbers >= first) & (numbers < first + size)]
        assert sorted(own[:size].tolist()) == [*range(first, first + size)]
        first += size


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_and_a_resume_take_the_same_windows(world, mixed):
    whole = batches_of(module := module_of(mixed), module.train_dataloader(), 8 * world)
    ranks = [module_of(mixed, rank, world, samples=2 * world * B) for rank in range(world)]
    each = [batches_of(own, own.train_dataloader(), 6).split(B) for own in ranks]
    steps = [batch for step in zip(*each, strict=True) for batch in step]
    assert torch.equal(torch.cat(steps), whole[2 * world * B :])


@pytest.mark.parametrize("world", [1, 2])
def test_validation_counts_each_held_out_target_of_each_source_once(world, mixed):
    modules = [module_of(mixed, rank, world) for rank in range(world)]
    index = load_index(modules[0].folder)
    found = torch.cat([batches_of(own, own.val_dataloader()) for own in modules])
    numbers = np.concatenate(
        [np.concatenate([*own.rows_by_source().values()]).ravel() for own in modules]
    )
    counts = (found[:, 1] != IGNORE).sum(1)
    assert not counts[numbers < 0].any()
    names = np.array(modules[0].sources_of("val", numbers))
    for name in LETTERS:
        here = (names == name) & (numbers >= 0)
        assert int(counts[here].sum()) == index.splits[f"{name}/val"].tokens - 1


def test_packing_belongs_to_the_mixture_not_to_a_source(sources):
    sources["code"] |= PACKED
    line = r"data.sources.code.packing=documents has no effect in a mixture; set data.packing"
    with pytest.raises(UserError, match=line):
        data_sources()["mixture"](sources=sources, weights=dict.fromkeys(sources, 1.0))


def words_of(command):
    """Return the settings of a run on a packed mixture of two sources."""
    words = ["data=mixture", f"data.root={command.folder}/data", "data.packing=documents"]
    for name, weight in (("code", 0.7), ("prose", 0.3)):
        path = command.folder / name
        own = path if path.exists() else write(command.folder, name)
        words += [f"data.sources.{name}=text", f"data.sources.{name}.path={own}"]
        words += [f"data.sources.{name}.val_fraction=0.3", f"data.weights.{name}={weight}"]
    sizes = ["batch.global_size=6", "batch.micro_size=1", "checkpoint.every=5", "model.n_layer=1"]
    return [*words, *sizes, "model.mask_documents=true"]


def rows(run):
    with (run / "metrics.csv").open() as file:
        return [
            {name: row[name] for name in row if "loss" in name or "data/tokens" in name}
            for row in csv.DictReader(file)
        ]


@pytest.mark.long
def test_a_killed_run_on_ranks_restarts_to_the_same_bits(command, train_and_kill):
    ranks = ("trainer=cpu", "strategy=ddp", "strategy.process_group_backend=gloo")
    words = [*words_of(command), *ranks, "trainer.devices=2"]
    said = command.train(*words, "run_dir=whole").stdout
    packing = r"packing    code: \d+ documents in \d+ windows, .* no token lost; prose: \d+ docu"
    assert re.search(packing, said)
    said = train_and_kill(*words, "run_dir=hit")
    assert "rank 1 was killed by SIGKILL; restarting" in said.stderr
    runs = [command.folder / name for name in ("whole", "hit")]
    whole, killed = (torch.load(run / "checkpoints/step=000020.ckpt")["state_dict"] for run in runs)
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    one, other = map(rows, runs)
    assert one[2:] == other[2:]
    assert float(one[-1]["val/loss/code"]) > 0
