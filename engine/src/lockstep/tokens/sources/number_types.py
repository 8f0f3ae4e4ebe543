"""Which type the numbers of a file seem to have, and which other formats a file may be of.

A flat file of tokens doesn't say its type. Read as another one, it may give valid ids: of a file of
uint32 that is read as uint16, every second id is 0. A format that names itself is a fact; a type is
only a guess, from a sample of several places, because real data may be anything.
"""

from __future__ import annotations

import json
import re
import shlex
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

FEW = 32  # numbers that aren't 0; fewer tell nothing
DISTINCT = 16  # values; fewer are a pattern that somebody made
MANY = 1024  # numbers, for statistics
LARGEST = 10**7  # what an id is below, as `vocab_size` is
PLACES = 64  # of a sample
PIECE = 4096  # bytes at each place
NPY = "save its array with tofile(), which writes no header, as a .bin file"
UNPACK = "unpack it"
# The first bytes of a file -> what it is, and what to do.
FORMATS = {
    b"\x93NUMPY": ("an array of NumPy with a header (.npy)", NPY),
    b"PK\x03\x04": ("a ZIP archive, such as an .npz file or a model of PyTorch", ""),
    b"PAR1": ("a Parquet file", "use data=parquet"),
    b"\x28\xb5\x2f\xfd": ("packed with zstd", UNPACK),
    b"\xfd7zXZ\0": ("packed with xz", UNPACK),
    **{b"BZh%d1AY&SY" % level: ("packed with bzip2", UNPACK) for level in range(1, 10)},
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", ""),
    b"ARROW1\0\0": ("an Arrow file", ""),
    b"MMIDIDX\0\0": ("an index of Megatron-LM", ""),
    b"\x89PNG\r\n\x1a\n": ("an image", ""),
    b"%PDF-": ("a PDF file", ""),
}
# Other files of llm.c, by their first integer of 32 bits.
OF_LLM_C = {
    20240326: "a model of llm.c",
    20240803: "a model of llm.c",
    20240327: "a state of llm.c for tests",
    20240328: "a tokenizer of llm.c",
    20240522: "an evaluation of llm.c",
}
OTHER = "give files that are flat arrays of tokens"
# Types that files have, as NumPy writes them, in the order in which they are tried: the wide ones
# also look like narrow ones.
TYPES = {
    "int64": "<i8",
    "uint32": "<i4",
    "float64": "<f8",
    "float32": "<f4",
    "big-endian int64": ">i8",
    "big-endian uint32": ">i4",
}
TEXT = re.compile(rb"[^\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]*")  # no control characters


class Guess(NamedTuple):
    """What a file seems to contain, in place of what it is read as."""

    name: str  # of the type, such as uint32
    fact: str  # what tells it
    code: str  # the type as NumPy writes it; "": its numbers are no ids
    has_negative: bool = False  # -1, which is no id


def sample_of(read: Callable[[int, int], bytes], size: int, is_here: bool) -> bytes:
    """Return bytes from several places of a file, all of them at multiples of eight.

    Args:
        read: returns as many bytes as its second argument says, from the first one on.
        size: of the file.
        is_here: whether it is on this machine; a server may send all that lies between.
    """
    if size <= PLACES * PIECE:
        return read(0, size // 8 * 8)
    if not is_here:
        return read(0, PLACES * PIECE)
    places = np.linspace(0, size - PIECE - 8, PLACES).astype(np.int64) // 8 * 8
    return b"".join(read(place, PIECE) for place in places.tolist())


def format_of(start: bytes, size: int) -> tuple[str, str] | None:
    """Return what a file is and what to do, if its first bytes name another format.

    Args:
        start: at least 1,024 bytes, if the file has as many.
        size: of the file.
    """
    for magic, (name, remedy) in FORMATS.items():
        if start.startswith(magic):
            return name, remedy or OTHER
    if start[257:262] == b"ustar":
        return "a tar archive", UNPACK
    number = int.from_bytes(start[:4], "little")
    if len(start) >= 1024 and number in OF_LLM_C:
        return OF_LLM_C[number], OTHER
    if start[:3] == b"\x1f\x8b\x08" and _is_gzip(start):
        return "packed with gzip", UNPACK
    if _is_safetensors(start, size):
        return "a safetensors file", OTHER
    return None


def _is_gzip(start: bytes) -> bool:
    try:
        zlib.decompressobj(wbits=31).decompress(start, 100)
    except zlib.error:
        return False
    return True


def _is_safetensors(start: bytes, size: int) -> bool:
    length = int.from_bytes(start[:8], "little")
    if not start[8:].startswith(b'{"') or length > size - 8:
        return False
    header = start[8 : 8 + length]
    if len(header) < length:
        return b'"dtype":' in header or b'"__metadata__":' in header
    try:
        return isinstance(json.loads(header), dict)
    except ValueError:
        return False


def guess_type(sample: bytes, itemsize: int) -> Guess | None:
    """Return what a file seems to contain, if that isn't what it is read as.

    Args:
        sample: of the file; its length is a multiple of eight.
        itemsize: bytes of an integer as the file is read, little-endian: 2 or 4.
    """
    if _is_text(sample):
        return Guess("text, or of uint8", "its bytes are characters", "u1")
    for name, code in TYPES.items():
        values = np.frombuffer(sample, code)
        if values.dtype.kind == "f":
            guess = _guess_floats(name, values)
        elif values.itemsize > itemsize or code[0] == ">":
            guess = _guess_integers(name, values, itemsize)
        else:
            continue
        if guess:
            return guess
    if itemsize == 2:
        return _guess_by_bytes(np.frombuffer(sample, "<u2"))
    return None


def fitting_type(sample: bytes, itemsize: int, vocab_size: int) -> Guess | None:
    """Return the type in which all ids are below `vocab_size`, if the one that is read isn't it."""
    for name, code in (("uint32", "<u4"), ("uint16", "<u2"), ("big-endian uint16", ">u2")):
        values = np.frombuffer(sample, code)
        if code == f"<u{itemsize}" or np.count_nonzero(values) < FEW:
            continue
        if values.max() < vocab_size and len(np.unique(values)) >= DISTINCT:
            return Guess(name, "all of its numbers are in the vocabulary", code)
    return None


def conversion(path: str, guess: Guess, vocab_size: int) -> str:
    """Return how to write a file's ids in a type that can be read."""
    name, code = ("uint16", "<u2") if vocab_size <= 1 << 16 else ("uint32", "<u4")
    new = f"{path.removesuffix('.bin')}.{name}.bin"
    ids = "a[a >= 0]" if guess.has_negative else "a"
    line = (
        f"import numpy; a = numpy.fromfile({path!r}, {guess.code!r}); "
        f"{ids}.astype({code!r}).tofile({new!r})"
    )
    typed = shlex.quote(line) if re.search(r'["$`\\!]', line) else f'"{line}"'
    without = ", without its -1" if guess.has_negative else ""
    return f"convert it{without}: python -c {typed}, and give {new} with data.source.dtype={name}"


def _is_text(sample: bytes) -> bool:
    """Return whether bytes are characters; a piece may begin or end within one."""
    pieces = [sample[place : place + PIECE] for place in range(0, len(sample), PIECE)]
    is_enough = len(sample) >= 2 * FEW and len({*sample}) >= DISTINCT // 2
    return is_enough and all(map(_is_piece_of_text, pieces))


def _is_piece_of_text(piece: bytes) -> bool:
    inner = piece.lstrip(bytes(range(0x80, 0xC0)))
    if len(piece) - len(inner) > 3 or not TEXT.fullmatch(inner):
        return False
    try:
        inner.decode()
    except UnicodeDecodeError as error:
        return len(inner) - error.start <= 3 and error.reason == "unexpected end of data"
    return True


def _guess_integers(name: str, values: npt.NDArray[Any], itemsize: int) -> Guess | None:
    """Return the guess if wide integers are ids, and not two or four narrow ones each."""
    has_negative = bool((values == -1).any())
    ids = values[(values != 0) & (values != -1)]  # 0 may be padding
    if not _tell(ids) or ids.min() < 0 or ids.max() >= LARGEST:
        return None
    low, high = ids & 0xFFFF, ids >> 16
    # Of two narrow ids, the first one would not be the larger one each time.
    is_small = np.count_nonzero(high) <= len(high) // 100
    if not is_small and np.count_nonzero(low >= 256) < FEW:
        return None
    zeros = "every second number is 0"
    if ids.itemsize == 8 and itemsize == 2:
        zeros = "half of its numbers are 0" if high.any() else "three of four numbers are 0"
    elif ids.itemsize == 4 and high.any():
        zeros = f"every second number is at most {high.max()}"
    if has_negative:
        name = name.replace("uint", "int")
        zeros += " or -1"
    return Guess(name, zeros, values.dtype.str, has_negative)


def _guess_floats(name: str, values: npt.NDArray[Any]) -> Guess | None:
    """Return the guess if numbers are of common sizes; other data as floats are of all sizes."""
    with np.errstate(all="ignore"):
        values = values[values != 0].astype(np.float64)
        are_whole = bool((values == np.rint(values)).all())
        sizes = np.abs(values)
        if not _tell(sizes):
            return None
        if np.count_nonzero((sizes > 1e-6) & (sizes < 1e9)) < 0.99 * len(sizes):
            return None
    fact = f"its bytes are numbers such as {values[0]:g}"
    has_negative = bool((values < 0).any())
    code = {"float64": "<f8", "float32": "<f4"}[name] if are_whole else ""
    return Guess(name, fact, code, has_negative)


def _tell(values: npt.NDArray[Any]) -> bool:
    """Return whether there are enough numbers that aren't 0, and enough different ones."""
    return len(values) >= FEW and len(np.unique(values)) >= DISTINCT


def _guess_by_bytes(values: npt.NDArray[Any]) -> Guess | None:
    """Return what numbers of 16 bits are by how their bytes are distributed.

    The high byte of ids varies less than the low one. Both bytes of two ids of 8 bits are alike.
    """
    values = values[values != 0]  # padding
    if len(values) < MANY or not _tell(values):
        return None
    low, high = (_shares(part.astype(np.uint8)) for part in (values & 0xFF, values >> 8))
    if _entropy(low) < _entropy(high) - 1:
        return Guess("big-endian uint16", "the first byte of each number is the high one", ">u2")
    is_alike = np.abs(low - high).sum() / 2 < 0.2
    if is_alike and _entropy((low + high) / 2) < 7 and np.count_nonzero(low) >= DISTINCT:
        return Guess("uint8", "both bytes of its numbers have the same values", "u1")
    return None


def _shares(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """Return how often each byte occurs, (256,); the sum is 1."""
    shares: npt.NDArray[np.float64] = np.bincount(values, minlength=256) / len(values)
    return shares


def _entropy(shares: npt.NDArray[np.float64]) -> float:
    """Return the bits of a distribution."""
    some = shares[shares > 0]
    return float(-(some * np.log2(some)).sum())
