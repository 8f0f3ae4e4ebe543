"""A corpus of several files."""

import re

import numpy as np
import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.sources.text import TextData


@pytest.fixture
def corpus(tmp_path):
    """A folder of text files; returns a function that creates the settings for it."""
    words = [f"{word} " for word in re.findall(r"\w+", ByteTokenizer.__doc__)]
    random = np.random.default_rng(0)
    for number in range(25):
        text = "".join(random.choice(words, size=15_000))
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(text)

    def settings(**changes):
        root, path = str(tmp_path / "data"), str(tmp_path / "texts")
        return TextData(**{"root": root, "path": path, "val_fraction": 0.4, **changes})

    return settings
