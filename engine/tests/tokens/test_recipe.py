"""Fingerprints are those of 0.1.0, so its prepared folders are found again."""

import json
import os
from dataclasses import replace
from pathlib import Path

import fsspec  # noqa: F401 (it reads `sys.version` when it is imported)
import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from lockstep import configs
from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import FORMER, _digest, recipe_of
from lockstep.tokens.shards import INDEX, load_index
from lockstep.tokens.sources.text import Text

CONFIGS = Path(configs.__file__).parent
FILES = {
    "a.txt": "some text\n",
    "b/c.txt": "more",
    "a.jsonl": '{"text": "t"}\n',
    "a.parquet": "PAR1",
    "a.bin": "\1\0\2\0",
    "a.py": "x = 1\n",
}
# What 0.1.0 computed for these files and settings.
OF_0_1_0 = [
    ("text", {"path": ""}, "2267f174e2a396d02c11bdc798eb1f7e2d51d6deebeff8fae787bb5febc49469"),
    (
        "text",
        {
            "path": "a.txt",
            "documents": "line",
            "shard_mb": 1,
            "val_fraction": 0.1,
            "tokenizer": "bpe",
        },
        "7418a8b1d57cd0f8b80d18c5787b6f1ebe93d22ddeeab774b42a0388a900e981",
    ),
    ("jsonl", {"path": ""}, "9d40ccb74ee599bdb7e8b131395cd8709a90e5dc25b132169e0ce9f435e21dcb"),
    ("parquet", {"path": ""}, "16d947780904f93a04ed5cb4d0473a6b8f5fd5aa2161b97f0c3951f2ac2640d1"),
    (
        "shards",
        {"path": "a.bin"},
        "5909c864c0c1946ebeb63a027f6ffe7a8ac52003ab5c0a9341895644f0e8f852",
    ),
    ("synthetic", {}, "38994fdf2150e934cab659274e9f70ecd622385f619bae88f418eb5f84c7d4ab"),
    (
        "huggingface",
        {"path": "someone/texts"},
        "65ebf8ac0c87b86b6cc08bd5e7edba806f7a0adb9de6a8a95bff6dfd8e2abb1a",
    ),
    ("stdlib", {}, "20168ca4817f8ada4741cfe1e5fcae733b2f811dfd8c9d2e8aab0e8eeb7282ad"),
]
# What it computed without its extra `sources`.
BARE = [
    ("text", {"path": ""}, "2c9e446095940ce417d110bcf8fcb2ef8aad6a444364194bd4245ee309f7e6b1"),
    (
        "text",
        {"path": "a.txt", "val_fraction": 0.1},
        "5947aff6f02a7d1249e7ed1215a97312f7434dc34ccd00ff6faeeebff7c886a0",
    ),
    ("stdlib", {}, "13b2423ecb0cdfa1377d37830c61c464ac23e8acdab63f440492d67371325993"),
]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A function that returns a source on files that are the same everywhere."""
    files = tmp_path / "files"
    for name, text in FILES.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(files))
    monkeypatch.setattr("sys.version", "3.11.0 (main)")

    def make(name, settings):
        settings = {"root": str(tmp_path / "data"), **settings}
        if "path" in settings and name != "huggingface":
            settings["path"] = str(files / settings["path"])
        target = OmegaConf.load(CONFIGS / f"source/{name}.yaml")._target_
        return get_class(target)(**settings)

    return make


@pytest.mark.parametrize(("name", "settings", "fingerprint"), OF_0_1_0)
def test_fingerprints_are_those_of_0_1_0(source, name, settings, fingerprint):
    assert recipe_of(source(name, settings)).fingerprint == fingerprint


@pytest.mark.parametrize(("name", "settings", "fingerprint"), BARE)
def test_a_run_of_bare_0_1_0_names_tokens_that_are_recognized(source, name, settings, fingerprint):
    recipe = recipe_of(source(name, {**settings, "fingerprint": fingerprint}))
    assert recipe.fingerprint == fingerprint


def prepared_by_bare_0_1_0(config):
    """Prepare a folder as 0.1.0 without `sources` would have, and return it."""
    recipe = recipe_of(config)
    folder = prepare(config)
    values = json.loads((folder / INDEX).read_text())
    values["settings"] = {name: recipe.settings[name] for name in FORMER}
    values["fingerprints"]["settings"] = _digest(values["settings"])
    former = replace(recipe, fingerprints=values["fingerprints"])
    values["fingerprint"] = former.fingerprint
    del values["sha256"]
    (folder / INDEX).write_text(json.dumps(values))
    return folder.rename(former.folder)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 100)
    return Text(root=str(tmp_path / "data"), path=str(tmp_path / "a.txt"), val_fraction=0.2)


def test_a_folder_of_bare_0_1_0_is_found_and_not_prepared_again(text):
    folder = prepared_by_bare_0_1_0(text)
    assert prepare(text) == folder
    assert [path for path in Path(text.root).iterdir() if path.name[0] != "."] == [folder]


def test_a_run_of_bare_0_1_0_opens_its_tokens_by_their_fingerprint(text):
    folder = prepared_by_bare_0_1_0(text)
    frozen = replace(text, fingerprint=load_index(folder).fingerprint)
    Path(text.path).unlink()
    assert prepare(frozen) == folder


def test_a_lost_folder_of_a_run_of_bare_0_1_0_is_prepared_again(text):
    folder = prepared_by_bare_0_1_0(text)
    tokens = (folder / "train-00000.bin").read_bytes()
    frozen = replace(text, fingerprint=load_index(folder).fingerprint)
    folder.rename(folder.with_name("elsewhere"))
    assert prepare(frozen) == folder
    assert (folder / "train-00000.bin").read_bytes() == tokens
    assert load_index(folder).fingerprint == frozen.fingerprint


@pytest.mark.parametrize(
    "change",
    [{"documents": "line"}, {"invalid_utf8": "skip"}, {"shard_mb": 1}, {"test_fraction": 0.2}],
)
def test_settings_that_bare_0_1_0_lacked_are_not_its_tokens(text, change):
    folder = prepared_by_bare_0_1_0(text)
    frozen = load_index(folder).fingerprint
    folder.rename(folder.with_name("elsewhere"))
    with pytest.raises(UserError, match=r"is missing, and the corpus.+ have changed"):
        prepare(replace(text, fingerprint=frozen, **change))
