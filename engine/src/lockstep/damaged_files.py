"""Reads files that may be unreadable or damaged; each line names the file, and what is wrong."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import UserError, remedy_of_limit

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an `OSError` while `path` is read into a `UserError` of one line."""
    try:
        yield
    except OSError as error:
        if remedy_of_limit(error):  # nothing is wrong with the file
            raise
        raise UserError(f"{path} cannot be read: {error.strerror}; make it readable") from None


def read_object(path: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and what is wrong with the file.

    The object is empty if the file is missing, which is no fault, or if it is damaged.
    """
    try:
        if is_special(path):
            return {}, "is not a file"
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):  # the former includes text in another encoding
        return {}, "is damaged (not JSON)"
    if not isinstance(content, dict):
        return {}, "is damaged (not an object)"
    return content, ""


def is_special(path: Path) -> bool:
    """Return whether something is there that could block its reader, such as a pipe."""
    return path.exists() and not (path.is_file() or path.is_dir())


def read_informative_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file that only informs; empty, with a warning, if damaged."""
    content, fault = read_object(path)
    if fault:
        logger.warning("%s %s; ignored", path, fault)
    return content


def read_informative_text(path: Path) -> str:
    """Return the text of a file that only informs; empty, with a warning, if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("%s cannot be read (%s); ignored", path, error.strerror)
        return ""


def refuse_misplaced(folder: Path) -> None:
    """Raise a `UserError` if something is in the place of a folder of checkpoints."""
    if not folder.is_dir() and (folder.is_symlink() or folder.exists()):
        raise UserError(f"{folder} {absence_of(folder)}; mount or restore the folder")


def absence_of(folder: Path) -> str:
    """Return why `folder` has no checkpoints, as the end of a sentence about it."""
    if folder.is_dir():
        return "has no checkpoint"
    if folder.exists():
        return "is not a folder"
    if folder.is_symlink():
        return f"is a link to {folder.readlink()}, which is missing"
    return "is missing"
