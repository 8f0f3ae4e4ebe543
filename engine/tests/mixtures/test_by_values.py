"""Order and packing are values: any combination of them makes the batches of a run."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lockstep.building import build
from lockstep.errors import UserError
from lockstep.functional import IGNORE
from lockstep.loading.order import RankOrder
from lockstep.mixtures.mixing import renamed
from lockstep.mixtures.mixture import Mixture
from lockstep.mixtures.whole_documents import WholeDocuments
from lockstep.settings import setting
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import splits_of
from lockstep.tokens.shards import check_content, load_index, open_split
from lockstep.tokens.sources.text import Text
from lockstep.tokens.windows import Stored, StreamWindows, read_windows

T = 16


class Numbered:
    """A packing whose window n has n as each of its tokens, and targets of n + 1; also windows."""

    has_padding = False
    counts: ClassVar = {"code": 5, "poems": 130, "prose": 7}

    def prepare(self, _folder, block_size):
        self.block_size = block_size

    def open(self, *_):
        return self

    def describe(self, *_):
        return None

    def __len__(self):
        return sum(self.counts.values())

    def __getitems__(self, rows):
        return torch.tensor(rows)

    def collate(self, windows):
        return Stored(windows, len(windows))

    def pad(self, stored, real):
        return stored._replace(real=real)

    def widen(self, stored):
        tokens = stored.ids[:, None].expand(-1, self.block_size).clone()
        targets = tokens + 1
        targets[stored.real :] = IGNORE
        return tokens, targets


def batches_of(module, count):
    feed = iter(module.train_dataloader())
    pairs = [module.on_after_batch_transfer(next(feed), 0) for _ in range(count)]
    return [torch.cat(column) for column in zip(*pairs, strict=True)]


def test_the_order_of_a_mixture_takes_the_windows_of_any_packing(corpora, module_of):
    data = corpora(weights={"code": 0.5, "poems": 0.2, "prose": 0.3})
    module = module_of(data, packing=Numbered())
    tokens, targets = batches_of(module, 25)
    expected = data.order(Numbered.counts, 400, T, 5)(np.arange(100))
    assert tokens[:, 0].tolist() == expected.tolist()
    assert torch.equal(targets, tokens + 1)
    assert not module.may_ignore
    places = np.searchsorted([5, 135], expected, "right")
    assert np.bincount(places).tolist() == [50, 20, 30]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_one_epoch_of_three_packed_sources_has_each_window_once(world, corpora, module_of):
    data = corpora(epochs={"code": 1.0, "poems": 1.0, "prose": 1.0})
    packing = WholeDocuments()
    modules = [module_of(data, rank, world, packing=packing, batch=1) for rank in range(world)]
    total = len(modules[0].windows["train"])
    steps = -(-total // world)
    for module in modules:
        module.trainer.max_steps = steps
    order = modules[0].train_dataloader().order
    places = [iter(RankOrder(order, 1, rank, world)) for rank in range(world)]
    taken = [int(next(of_rank).samples[0]) for _ in range(steps) for of_rank in places]
    assert sorted(taken[:total]) == [*range(total)]
    tokens, _ = read_windows(modules[0].windows["train"], taken[:total])
    stream = prepare(data)
    expected = np.concatenate(
        [np.asarray(open_split(stream, f"{name}/train"))[:-1] for name in data.names_of_sources()]
    )
    values = tokens.flatten()
    counts = np.bincount(values.numpy(), minlength=256)
    counts[1] = 0  # padding
    assert counts.tolist() == np.bincount(expected, minlength=256).tolist()


@pytest.fixture
def with_tests(corpora):
    """A mixture of three sources, of which two hold out a test split."""

    def mixed(**changes):
        data = corpora(**changes)
        for name in ("code", "prose"):
            data.sources[name].test_fraction = 0.1
        return data

    return mixed


def test_a_mixture_has_the_test_splits_of_its_sources(with_tests):
    data = with_tests()
    folder = prepare(data)
    index = load_index(folder)
    check_content(folder, index)
    assert splits_of(data) == ("train", "val", "test")
    assert {name for name in index.splits if "test" in name} == {"test", "code/test", "prose/test"}
    windows = StreamWindows(folder, "test", T)
    assert windows.counts == {"code": 187, "prose": 56}
    alone = [prepare(data.make_sources()[name]) for name in windows.counts]
    of_each = [load_index(folder).splits["test"] for folder in alone]
    for of in ("tokens", "text_bytes"):
        assert getattr(index.splits["test"], of) == sum(getattr(split, of) for split in of_each)
    expected = [StreamWindows(folder, "test", T)[np.arange(10)] for folder in alone]
    assert np.array_equal(windows[np.r_[:10, 187:197]], np.concatenate(expected))


@pytest.mark.parametrize("packing", [None, WholeDocuments()])
@pytest.mark.parametrize("world", [1, 3])
def test_ranks_test_each_window_of_each_source_once(packing, world, with_tests, module_of):
    data = with_tests()
    modules = [module_of(data, rank, world, packing=packing) for rank in range(world)]
    seen = []
    for module in modules:
        module.trainer.testing = True
        for stored in module.test_dataloader():
            tokens, targets = module.on_after_batch_transfer(stored, 0)
            seen += torch.stack([tokens, targets], 1)[(targets != IGNORE).any(1)].tolist()
    windows = modules[0].windows["test"]
    expected = torch.stack(read_windows(windows, range(len(windows))), 1).tolist()
    assert sorted(seen) == sorted(expected)


def test_a_mixture_without_a_test_split_says_where_to_set_one(corpora, module_of):
    with pytest.raises(
        UserError, match=r"with data\.source\.sources\.NAME\.test_fraction or data\.sou"
    ):
        module_of(corpora()).test_dataloader()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"path": ""}, r"^data\.source\.sources\.code\.path is empty; set it"),
        ({"path": "/nowhere"}, r"^data\.source\.sources\.code\.path=/nowhere matches no file"),
    ],
)
def test_an_error_names_the_setting_as_the_mixture_has_it(changes, line, corpora):
    data = corpora("code prose", sources={"code": {"val_fraction": 0.2, **changes}})
    with pytest.raises(UserError, match=line) as caught:
        prepare(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vocab_size": 300}, r"^data\.source\.sources\.code\.vocab_size=300 .* tokenizer=bpe"),
        ({"test_fraction": 0.9}, r"^data\.source\.sources\.code\.test_fraction=0\.9 and val_fr"),
        ({"documents": "page"}, r"^data\.source\.sources\.code\.documents=page is not one of file"),
        ({"shard_mb": 0}, r"^data\.source\.sources\.code\.shard_mb=0 must be at least 1"),
    ],
)
def test_a_mistake_in_a_source_is_named_where_it_is_typed(changes, line):
    target = {"_target_": f"{Text.__module__}.{Text.__name__}", "val_fraction": 0.2, **changes}
    mixture = {"_target_": f"{Mixture.__module__}.{Mixture.__name__}", "sources": {"code": target}}
    config = OmegaConf.create({"data": {"source": {**mixture, "weights": {"code": 1}}}})
    with pytest.raises(UserError, match=line) as caught:
        build(config.data.source)
    assert "\n" not in str(caught.value)


def test_a_setting_of_the_source_s_own_class_is_renamed_and_the_mixture_s_root_is_not():
    @dataclass
    class Mine(Text):
        mine: int = setting("of this source", 0)

    def fail():
        with renamed("a", Mine):
            raise UserError("data.source.mine=3, data.source.path=x, data.root=y, data.weights=z")

    with pytest.raises(UserError) as caught:
        fail()
    expected = (
        "data.source.sources.a.mine=3, data.source.sources.a.path=x, data.root=y, data.weights=z"
    )
    assert str(caught.value) == expected
