"""Where training data comes from: each corpus names itself and yields its data piece by piece.

No corpus is ever held in memory as a whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_gpt.config import DataConfig, SyntheticData, UserError
from lockstep_gpt.data.tokenizer import Tokens, token_dtype

SPLITS = ("train", "val")
# Installed packages are not the library; tests are long, repetitive and at times not valid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
SYNTHETIC_SEED = 20_231  # fixed: `seed` shall decide the order of samples, not the samples
BLOCK = 1 << 18  # tokens made at a time


@dataclass(frozen=True)
class Document:
    """One text of a corpus; `name` is unique in it and decides the document's split."""

    name: str
    text: bytes  # valid UTF-8


def split_of(name: str, val_fraction: float) -> str:
    """Return the split of a document, from its name alone: the same on every machine.

    A document never moves when others come or go. The share holds for documents, in the mean.
    """
    first = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8])
    return "val" if first < val_fraction * 2**64 else "train"


class StandardLibrary:
    """Every `.py` file of the Python standard library at hand, by sorted relative path."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or Path(sysconfig.get_path("stdlib"))
        self.skipped = 0  # files of the latest `documents()` that were not valid UTF-8
        self._sizes = dict(sorted(_python_files(self.root)))
        if not self._sizes:
            raise UserError(
                f"data.source=stdlib finds no .py file under {self.root}; use a Python that "
                "has its library as files, or data=synthetic"
            )

    def identity(self) -> dict[str, Any]:
        """Return what decides whether a prepared set may be used again.

        Sizes, not times or contents: a new container layer changes every time and no byte, and
        reading every file at each start would cost more than it protects from.
        """
        python = f"{platform.python_implementation()} {platform.python_version()}"
        return {"python": python, "files": self._sizes}

    def documents(self) -> Iterator[Document]:
        """Yield the files one by one; those that are not valid UTF-8 are counted in `skipped`.

        Raises:
            UserError: a file cannot be read.
        """
        self.skipped = 0
        for name in self._sizes:
            text = _read(self.root / name)
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                self.skipped += 1
            else:
                yield Document(name, text)


def _python_files(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield `(relative posix path, bytes)` in no order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in LEFT_OUT:
                    yield from _python_files(Path(entry.path), f"{prefix}{entry.name}/")
            elif entry.name.endswith(".py") and entry.is_file():
                yield prefix + entry.name, entry.stat().st_size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} of the corpus cannot be read ({error.strerror}); mend it or choose another "
            "source, for example data=synthetic"
        ) from error


class RandomTokens:
    """Uniformly random token ids, the same for the same size on every machine."""

    def __init__(self, vocab_size: int, tokens: int) -> None:
        self.vocab_size = vocab_size
        self.tokens = tokens

    def identity(self) -> dict[str, Any]:
        """Return what decides the tokens."""
        return {"seed": SYNTHETIC_SEED, "vocab_size": self.vocab_size, "tokens": self.tokens}

    def blocks(self, val_fraction: float) -> Iterator[tuple[str, Tokens]]:
        """Yield `(split, ids)`, first all of train, then all of val.

        Raw draws of Philox are scaled here, by the high half of `draw * vocab_size`, because
        NumPy promises stable raw draws but not a stable `integers()`. The bias is < 2**-16.
        """
        philox = np.random.Philox(SYNTHETIC_SEED)
        val = round(self.tokens * val_fraction)
        for split, total in (("train", self.tokens - val), ("val", val)):
            for start in range(0, total, BLOCK):
                draws = philox.random_raw(min(BLOCK, total - start)) >> np.uint64(32)
                ids = (draws * np.uint64(self.vocab_size)) >> np.uint64(32)
                yield split, ids.astype(token_dtype(self.vocab_size))


def open_corpus(config: DataConfig) -> StandardLibrary | RandomTokens:
    """Return the corpus that `config` selects."""
    if isinstance(config, SyntheticData):
        return RandomTokens(config.vocab_size, config.tokens)
    assert config.source == "stdlib", config.source
    return StandardLibrary()
