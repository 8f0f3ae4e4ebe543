import re
import subprocess
import sys

import pytest

from lockstep.errors import UserError
from lockstep.tokens.sources.source import Position, split_of_name
from lockstep.tokens.sources.stdlib import StandardLibrary


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that writes a library of these files and returns its source."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: {"stdlib": str(tmp_path)}[name])

    def write(files=(), **settings):
        for name, content in dict(files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return StandardLibrary(**settings)

    return write


def documents(source):
    """Return all documents with their splits."""
    blocks = source.blocks(Position())
    return [pair for block in blocks for pair in zip(block.texts, block.splits, strict=True)]


def test_documents_of_the_library_come_sorted_by_relative_path(library):
    files = {"b.py": b"B", "a/z.py": b"Z", "a.py": b"A", "a/b.py": b""}
    source = library(files)
    names = [file.name for file in source.files]
    assert names == ["a.py", "a/b.py", "a/z.py", "b.py"]
    assert documents(source) == [(files[name], split_of_name(name, 0.02, 0)) for name in names]


@pytest.mark.parametrize(
    "left_out",
    [
        "site-packages/x.py",
        "dist-packages/x.py",
        "test/x.py",
        "lib2to3/tests/x.py",
        "idlelib/idle_test/x.py",
        "a/__pycache__/x.py",
        "a/readme.txt",
    ],
)
def test_files_outside_the_library_are_left_out(library, left_out):
    source = library({left_out: b"x", "kept.py": b"y"})
    assert [file.name for file in source.files] == ["kept.py"]


def test_an_empty_library_is_rejected_with_a_remedy(library, tmp_path):
    with pytest.raises(UserError, match="data=stdlib.*" + re.escape(str(tmp_path)) + ".*data=text"):
        library().identity()


def test_identity_of_the_library_changes_with_names_and_sizes_only(library):
    before = library({"a.py": b"12"}).identity()
    assert library({"a.py": b"34"}).identity() == before
    longer = library({"a.py": b"123"}).identity()
    assert longer != before
    assert library({"a.py": b"12", "b.py": b""}).identity() not in (before, longer)


@pytest.mark.parametrize("test_fraction", [0.0, 0.2])
def test_the_library_at_hand_is_found_and_split_by_name(test_fraction):
    source = StandardLibrary(val_fraction=0.1, test_fraction=test_fraction)
    names = [file.name for file in source.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    splits = [split for _, split in documents(source)]
    assert splits == [split_of_name(name, 0.1, test_fraction) for name in names]
    assert source.size == sum(file.size for file in source.files)


def test_libraries_that_not_everyone_has_are_imported_when_used():
    code = """import sys, lockstep.configs, lockstep.launch, pathlib
from hydra.utils import get_class
from omegaconf import OmegaConf
for path in pathlib.Path(lockstep.configs.__file__).parent.glob("source/*.yaml"):
    get_class(OmegaConf.load(path)._target_)
print({"torch", "tokenizers", "datasets", "pyarrow", "zstandard", "fsspec"} & {*sys.modules})"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "set()\n", result.stderr
