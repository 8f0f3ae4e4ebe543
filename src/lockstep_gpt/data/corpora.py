"""Where training data comes from: each corpus names itself and yields its data piece by piece."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from lockstep_gpt import config as schema
from lockstep_gpt.config import DataConfig, UserError
from lockstep_gpt.data.tokenizer import ByteTokenizer, Tokenizer, cut
from lockstep_gpt.registry import merged, resolved

# Installed packages are not the library; tests are long, repetitive and at times not valid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LONGEST = 1 << 22  # bytes of a file that are one document at most
FEW = 10  # held-out files to expect, below which a part of every file is held out instead
ENDS = "the end of each file"  # that part


class Stretch(NamedTuple):
    """Documents of one split of a corpus."""

    split: str
    texts: list[bytes]  # valid UTF-8
    invalid: int = 0  # how many of them were not UTF-8


class Corpus(Protocol):
    """What `prepare` asks of a corpus."""

    size: int | None  # bytes to read in all; None where nobody knows before the end
    tokenizer_identity: Any  # plain values that change with what decides the ids of a text

    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that decides the tokens."""

    def make_tokenizer(self) -> Tokenizer:
        """Return what makes its tokens; that may be learnt from it."""

    def stretches(self) -> Iterator[Stretch]:
        """Yield all of it; raise a `UserError` if something cannot be read."""


def split_of(name: str, val_fraction: float) -> str:
    """Return the split that a document has by its name alone, on every machine and for good."""
    first = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8])
    return "val" if first < val_fraction * 2**64 else "train"


class File(NamedTuple):
    """One file of a corpus."""

    name: str  # below what the user gave, so the same wherever the corpus lies
    size: int
    stamp: Any  # changes with the content, as far as the file system tells
    path: str


def files_below(
    folder: str, ending: str = "", left_out: Collection[str] = (), above: str = ""
) -> Iterator[File]:
    """Yield the files of a folder and of those in it, none hidden, in no order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = above + entry.name
            if entry.name in left_out or entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from files_below(entry.path, ending, left_out, f"{name}/")
            elif name.endswith(ending) and entry.is_file():
                yield File(name, entry.stat().st_size, entry.stat().st_mtime, entry.path)


class TextFiles:
    """Files of text, a document each, in the order of their names, or a `UserError`."""

    tokenizer_identity: Any = (ByteTokenizer.kind,)

    def __init__(self, config: schema.DocumentsData, path: str, by_name: bool = False) -> None:
        self.path, self.val_fraction = path, config.val_fraction
        self.files = sorted(self.find(), key=lambda file: file.name)
        self.size: int | None = sum(file.size for file in self.files)
        # Names of a few files may hold out none: then each file's end is held out.
        self.by_name = by_name or len(self.files) * config.val_fraction >= FEW

    @property
    def held_out(self) -> str:
        """Say what validation is made of."""
        return "whole documents" if self.by_name else ENDS

    def find(self) -> list[File]:
        """Look for the files, in no order."""
        path = Path(self.path).expanduser()
        found = [*files_below(str(path))] if path.is_dir() else []
        if path.is_file():
            found = [File(path.name, path.stat().st_size, path.stat().st_mtime, str(path))]
        if not found:
            raise UserError(f"data.path={self.path} matches no file; give a file or a folder")
        if packed := [each.name for each in found if each.name.endswith((".gz", ".zst"))]:
            raise UserError(f"data.path={self.path}: {packed[0]} is compressed; unpack it first")
        return found

    def identity(self) -> Any:
        """Return the names, sizes and times of change."""
        return [file[:3] for file in self.files]

    def make_tokenizer(self) -> Tokenizer:
        """Return the bytes."""
        return ByteTokenizer()

    def stretches(self) -> Iterator[Stretch]:
        """Yield the documents, file by file."""
        for file in self.files:
            for piece in _pieces(file.path):
                refuse_binary(piece, file.path)
                text = piece.decode("utf-8", "replace").encode()
                for split, document in self.documents(text, file.name):
                    yield Stretch(split, [document])
                if text != piece:
                    yield Stretch("train", [], invalid=1)

    def documents(self, text: bytes, name: str) -> list[tuple[str, bytes]]:
        """Return the documents in a text of the file of this name, each with its split."""
        if self.by_name or not text:
            return [(split_of(name, self.val_fraction), text)]
        end = cut(text[: int(len(text) * (1 - self.val_fraction))])
        return [("train", text[:end]), ("val", text[end:])]


def refuse_binary(piece: bytes, path: str) -> None:
    """Raise a `UserError` for a piece of a file that is no text; text in UTF-16 is none either."""
    if b"\0" in piece:
        raise UserError(f"{path} is not text: it has NUL bytes; remove it, or save it as UTF-8")


def _pieces(path: str) -> Iterator[bytes]:
    """Yield a file, in pieces where it is long, cut where a text may be cut."""
    rest = b""
    try:
        with Path(path).open("rb") as file:
            while len(rest := rest + file.read(LONGEST + 1 - len(rest))) > LONGEST:
                end = cut(rest[:LONGEST])
                yield rest[:end]
                rest = rest[end:]
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; fix it, or choose another corpus"
        ) from error
    yield rest


class StandardLibrary(TextFiles):
    """Every `.py` file of the Python standard library at hand."""

    def __init__(self, config: schema.StdlibData, root: Path | None = None) -> None:
        super().__init__(config, str(root or sysconfig.get_path("stdlib")), by_name=True)

    def identity(self) -> Any:
        """Return names and sizes: a new layer of a container changes every time and no byte."""
        return [sys.version.split()[0], *(file[:2] for file in self.files)]

    def find(self) -> list[File]:
        """Look for the files, in no order."""
        found = list(files_below(self.path, ".py", LEFT_OUT))
        if not found:
            raise UserError(
                f"data.source=stdlib finds no .py file under {self.path}; use a Python that has "
                "its library as files, or data=text"
            )
        return found


CORPORA: dict[str, Callable[[Any], Corpus]] = {
    "stdlib": StandardLibrary,
    "text": lambda config: TextFiles(config, config.path),
}


def corpus_of(config: DataConfig) -> Corpus:
    """Open the corpus that `data.source` names; of an extra where the settings are the extra's."""
    settings, target = merged("SOURCES").get(config.source, (None, None))
    if settings and isinstance(config, resolved(settings)):
        return cast(Corpus, resolved(target)(config))
    return CORPORA[config.source](config)
