"""A corpus of several files."""

from functools import partial

import pytest

from lockstep_gpt.data.sources.text import Text


@pytest.fixture
def corpus(tmp_path, texts):
    """A function that creates the settings for a folder of text files."""
    root = str(tmp_path / "data")
    return partial(Text, root=root, path=str(texts), val_fraction=0.4)
