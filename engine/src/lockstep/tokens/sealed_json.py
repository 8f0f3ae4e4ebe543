"""JSON files with a SHA-256 of their own values, so a changed byte is found when one is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

from lockstep.whole_files import replace_text

SEAL = "sha256"  # the key of the hash, the last one in the file


def write_sealed(path: Path, values: dict[str, Any]) -> None:
    """Replace a file with `values` and their SHA-256."""
    replace_text(path, json.dumps({**values, SEAL: _hash_of(values)}, indent=1))


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the values of a file; earlier versions wrote some without a SHA-256.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't a JSON object, or doesn't match its SHA-256.
    """
    try:
        values = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    if SEAL in values and values.pop(SEAL) != _hash_of(values):
        raise ValueError("it does not match its SHA-256")
    return values


def hash_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
