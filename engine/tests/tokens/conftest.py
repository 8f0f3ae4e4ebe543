"""A corpus of several files, and a prepared folder of random tokens."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest

from lockstep.tokens.shards import FORMAT, Index, SplitWriter, write_index
from lockstep.tokens.sources.text import Text


@pytest.fixture
def corpus(tmp_path, texts):
    """A function that creates the settings for a folder of text files."""
    root = str(tmp_path / "data")
    return partial(Text, root=root, path=str(texts), val_fraction=0.4)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Random two-byte tokens: 800 for training, 200 for validation, and 240 for tests."""
    folder, splits = tmp_path_factory.mktemp("data"), {}
    ids = np.random.default_rng(0).integers(1000, size=1240).astype("<u2")
    for name, part in zip(("train", "val", "test"), np.split(ids, [800, 1000]), strict=True):
        with closing(SplitWriter(folder, name, "<u2")) as writer:
            writer.append(part)
            splits[name] = writer.saved()
    about = {"vocab_size": 1000}, "f" * 64, {}, {"val_fraction": 0.2}
    write_index(folder, Index(FORMAT, "<u2", *about, splits))
    return folder
