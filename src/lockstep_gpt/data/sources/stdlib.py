"""Where training data comes from: each corpus identifies itself and yields its data in pieces."""

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

# Installed packages aren't the library; tests are long, repetitive, and sometimes invalid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
LONGEST = 1 << 22  # bytes per document at most; a longer file is cut
FEW = 10  # if fewer held-out files are expected, a part of every file is held out instead
ENDS = "the end of each file"  # that part; in a file over `LONGEST`, of each piece


class Stretch(NamedTuple):
    """Documents of one split of a corpus."""

    split: str
    texts: list[bytes]  # valid UTF-8
    invalid: int = 0  # how many documents were not valid UTF-8


class Corpus(Protocol):
    """What `prepare` needs from a corpus."""

    size: int | None  # total bytes to read; None if unknown before the end
    tokenizer_identity: Any  # plain values that change with anything that decides a text's ids

    def identity(self) -> Any:
        """Return plain values that change with anything in the corpus that decides the tokens."""

    def make_tokenizer(self) -> Tokenizer:
        """Return the corpus's tokenizer, which may be learned from it."""

    def stretches(self) -> Iterator[Stretch]:
        """Yield the whole corpus; raise a `UserError` if something cannot be read."""


def split_of(name: str, val_fraction: float) -> str:
    """Return a document's split by its name and `val_fraction` alone: the same everywhere."""
    first = int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8])
    return "val" if first < val_fraction * 2**64 else "train"


class File(NamedTuple):
    """One file of a corpus."""

    name: str  # relative to the path that the user gave, so the corpus can move
    size: int
    stamp: Any  # changes with the content, as far as the file system reports it
    path: str


def files_below(
    folder: str, ending: str = "", left_out: Collection[str] = (), above: str = ""
) -> Iterator[File]:
    """Yield the files in a folder and its subfolders, except hidden ones, in no set order."""
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
    """Text files, sorted by name, one document each unless cut; `UserError` if there are none."""

    tokenizer_identity: Any = (ByteTokenizer.kind,)

    def __init__(self, config: schema.DocumentsData, path: str, by_name: bool = False) -> None:
        self.path, self.val_fraction = path, config.val_fraction
        self.files = sorted(self.find(), key=lambda file: file.name)
        self.size: int | None = sum(file.size for file in self.files)
        # With few files, the names may hold out none. Then each file's end is held out.
        self.by_name = by_name or len(self.files) * config.val_fraction >= FEW

    @property
    def held_out(self) -> str:
        """Say what the validation split consists of."""
        return "whole documents" if self.by_name else ENDS

    def find(self) -> list[File]:
        """Find the files, in no set order, or raise a `UserError` if none is usable."""
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
        """Return the names, sizes, and modification times."""
        return [file[:3] for file in self.files]

    def make_tokenizer(self) -> Tokenizer:
        """Return the byte tokenizer."""
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
        """Return the documents in `text`, from the file `name`, each with its split."""
        if self.by_name or not text:
            return [(split_of(name, self.val_fraction), text)]
        end = cut(text[: int(len(text) * (1 - self.val_fraction))])
        return [("train", text[:end]), ("val", text[end:])]


def refuse_binary(piece: bytes, path: str) -> None:
    """Raise a `UserError` if a piece of a file contains NUL bytes, as binary data and UTF-16 do."""
    if b"\0" in piece:
        raise UserError(f"{path} is not text: it has NUL bytes; remove it, or save it as UTF-8")


def _pieces(path: str) -> Iterator[bytes]:
    """Yield a file; yield a long one in pieces, cut where `cut` allows."""
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
    """The `.py` files of the running Python's standard library, except `LEFT_OUT`."""

    def __init__(self, config: schema.StdlibData, root: Path | None = None) -> None:
        super().__init__(config, str(root or sysconfig.get_path("stdlib")), by_name=True)

    def identity(self) -> Any:
        """Return Python's version, names, and sizes: a new container layer changes only times."""
        return [sys.version.split()[0], *(file[:2] for file in self.files)]

    def find(self) -> list[File]:
        """Find the files, in no set order, or raise a `UserError`."""
        found = list(files_below(self.path, ".py", LEFT_OUT))
        if not found:
            raise UserError(
                f"data.source=stdlib finds no .py file under {self.path}; use a Python whose "
                "library is in files, or data=text"
            )
        return found


CORPORA: dict[str, Callable[[Any], Corpus]] = {
    "stdlib": StandardLibrary,
    "text": lambda config: TextFiles(config, config.path),
}


def corpus_of(config: DataConfig) -> Corpus:
    """Open the corpus that `data.source` names: an extra's if the settings are the extra's."""
    settings, target = merged("SOURCES").get(config.source, (None, None))
    if settings and isinstance(config, resolved(settings)):
        return cast(Corpus, resolved(target)(config))
    return CORPORA[config.source](config)
