"""A fingerprint is of names and contents: the same for each copy of a corpus, on any machine."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import fsspec  # noqa: F401 (it reads `sys.version` when it is imported)
import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from lockstep import configs
from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.sources import content
from lockstep.tokens.sources.content import REMEMBERED, sums_of

CONFIGS = Path(configs.__file__).parent
FILES = {
    "a.txt": "some text\n",
    "b/c.txt": "more",
    "a.jsonl": '{"text": "t"}\n',
    "a.parquet": "PAR1",
    "a.bin": "\1\0\2\0",
    "a.py": "x = 1\n",
}
# Tokens that were prepared before are found again only if these stay as they are.
KNOWN = [
    ("synthetic", {}, "38994fdf2150e934cab659274e9f70ecd622385f619bae88f418eb5f84c7d4ab"),
    (
        "huggingface",
        {"path": "someone/texts"},
        "65ebf8ac0c87b86b6cc08bd5e7edba806f7a0adb9de6a8a95bff6dfd8e2abb1a",
    ),
]
OF_FILES = [
    ("text", {"path": ""}),
    ("text", {"path": "a.txt", "documents": "line", "tokenizer": "bpe"}),
    ("text", {"path": "a.txt", "val_path": "b"}),
    ("jsonl", {"path": ""}),
    ("parquet", {"path": ""}),
    ("shards", {"path": "a.bin"}),
    ("huggingface", {"path": ""}),
    ("stdlib", {}),
]


def corpus_in(folder):
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def source_of(name, settings, files, root):
    places = {key: str(files / value) for key, value in settings.items() if "path" in key}
    target = OmegaConf.load(CONFIGS / f"source/{name}.yaml")._target_
    return get_class(target)(**{**settings, **places, "root": str(root)})


@pytest.mark.parametrize(("name", "settings", "fingerprint"), KNOWN)
def test_fingerprints_stay_as_they_are(name, settings, fingerprint):
    target = OmegaConf.load(CONFIGS / f"source/{name}.yaml")._target_
    assert recipe_of(get_class(target)(**settings)).fingerprint == fingerprint


@pytest.mark.parametrize(("name", "settings"), OF_FILES)
def test_a_copy_on_another_machine_has_the_same_fingerprint(name, settings, tmp_path, monkeypatch):
    fingerprints = []
    for number in range(3):
        files = corpus_in(tmp_path / str(number))
        os.utime(files / "a.txt", (1_700_000_000 + number, 1_700_000_000 + number))
        if number == 2:
            for path in files.rglob("a.*"):
                path.write_bytes(path.read_bytes()[::-1])
        monkeypatch.setattr("sysconfig.get_path", lambda _, files=files: str(files))
        source = source_of(name, settings, files, tmp_path / f"data-{number}")
        fingerprints.append(recipe_of(source).fingerprint)
    first, copy, other = fingerprints
    assert first == copy != other


def test_a_run_s_lost_tokens_are_prepared_again_from_a_copy_of_the_text(tmp_path):
    settings = {"path": "a.txt", "val_fraction": 0.5}
    here = source_of("text", settings, corpus_in(tmp_path / "here"), tmp_path / "data")
    first = prepare(here)
    fingerprint = recipe_of(here).fingerprint
    tokens = (first / "train-00000.bin").read_bytes()
    shutil.rmtree(tmp_path / "data")
    there = source_of("text", settings, corpus_in(tmp_path / "there"), tmp_path / "data")
    there.fingerprint = fingerprint
    assert prepare(there) == first
    assert (first / "train-00000.bin").read_bytes() == tokens


def test_the_identity_is_names_and_sha256(tmp_path):
    corpus_in(tmp_path / "files")
    names = ["a.txt", "b/c.txt"]
    expected = [[name, hashlib.sha256(FILES[name].encode()).hexdigest()] for name in names]
    source = source_of("text", {"path": "**/*.txt"}, tmp_path / "files", tmp_path)
    assert source.identity() == expected


def test_a_file_that_cannot_be_read_ends_the_reading_of_others(tmp_path):
    with (tmp_path / "endless").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder cannot be read: Is a directory"):
        sums_of([str(tmp_path / "endless"), str(tmp_path / "folder")], str(tmp_path))


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """A file, the folder that remembers its sum, and a function that returns that sum anew."""
    monkeypatch.setattr(content, "RECENT", -60.0)  # also remembers what has just changed
    path = tmp_path / "a.txt"
    path.write_text("some text")

    def sum_again():
        content._known.cache_clear()  # as in another process
        return sums_of([str(path)], str(tmp_path))[0]

    sum_again()
    return path, tmp_path / REMEMBERED, sum_again


def test_a_file_that_has_not_changed_is_not_read_again(remembered):
    path, memory, sum_again = remembered
    true = hashlib.sha256(b"some text").hexdigest()
    assert sum_again() == true
    memory.write_text(memory.read_text().replace(true, "remembered"))
    assert sum_again() == "remembered"
    times = path.stat()
    path.write_text("some TEXT")  # as long
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert sum_again() == hashlib.sha256(b"some TEXT").hexdigest()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": [1, 2]}'])
def test_a_damaged_memory_costs_only_time(remembered, text):
    _, memory, sum_again = remembered
    memory.write_text(text)
    assert sum_again() == hashlib.sha256(b"some text").hexdigest()
    assert json.loads(memory.read_text())


def test_what_has_just_changed_is_read_again(remembered, monkeypatch):
    path, memory, sum_again = remembered
    monkeypatch.setattr(content, "RECENT", 60.0)
    memory.unlink()
    sum_again()
    assert str(path) not in memory.read_text()
