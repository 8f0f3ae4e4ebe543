"""The files of a corpus on this machine: links are followed, and no folder is skipped silently."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

EVERYTHING = ("**",)  # the parts of a glob, between slashes


class LocalFiles:
    """Lists files as fsspec describes them; also other things than folders, such as FIFOs.

    Its methods raise an `OSError` if a folder can't be read, and a `UserError` if a link leads
    nowhere, or to a folder that the link is in.

    Args:
        system: fsspec's local file system, which skips links, and folders that it can't read.
    """

    def __init__(self, system: Any) -> None:
        self.system = system

    def in_folder(self, folder: str) -> list[dict[str, Any]]:
        """Return the files in a folder and its subfolders, except hidden ones."""
        return [*self._entries(folder, EVERYTHING, (os.path.realpath(folder),), hidden=False)]

    def of_glob(self, pattern: str) -> list[dict[str, Any]]:
        """Return the files that a glob matches, hidden ones too."""
        from fsspec.utils import glob_translate  # slow to import, and not always needed

        folder = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0] or "/"
        if not Path(folder).is_dir():
            return []
        parts = pattern.removeprefix(folder).lstrip("/").split("/")
        entries = self._entries(folder, parts, (os.path.realpath(folder),), hidden=True)
        is_match = re.compile(glob_translate(pattern)).match
        return [entry for entry in entries if is_match(entry["name"])]

    def _entries(
        self, folder: str, parts: Sequence[str], above: Sequence[str], hidden: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield what is in a folder and its subfolders, if a glob may match it.

        Args:
            folder: its path.
            parts: the rest of the glob, from this folder on; `**` matches the rest of any path.
            above: real paths of the first folder, and of those that links have led to.
            hidden: whether to include what is hidden.
        """
        with os.scandir(folder) as listed:
            entries = [*listed]
        rest = parts if parts[0] == "**" else parts[1:]
        for entry in entries:
            is_hidden = entry.name.startswith(".")
            if not _may_match(entry.name, parts[0]) or (is_hidden and not hidden):
                continue
            info = self._followed(entry)
            if info["type"] != "directory":
                yield info
            elif rest:  # without a rest, the glob matches the folder, not what is in it
                links = above
                if entry.is_symlink():
                    links = (*above, _real_path(entry.path, above))
                yield from self._entries(entry.path, rest, links, hidden)

    def _followed(self, entry: os.DirEntry[str]) -> dict[str, Any]:
        """Return the description of a file or a folder, or of what a link leads to."""
        info: dict[str, Any]
        if not entry.is_symlink():
            info = self.system.info(entry)
            return info
        try:
            info = self.system.info(entry.path)
        except OSError as error:
            raise UserError(
                f"{entry.path} of the corpus is a link to {Path(entry.path).readlink()}, which "
                f"cannot be read ({error.strerror}); restore what it leads to, or remove it"
            ) from error
        return info


def _may_match(name: str, part: str) -> bool:
    """Return whether a name may match a part of a glob; of `[...]`, fsspec knows more forms."""
    return "[" in part or fnmatchcase(name, part)


def _real_path(link: str, above: Sequence[str]) -> str:
    """Return the folder that a link leads to; raise a `UserError` if the link is in that folder."""
    target = os.path.realpath(link)
    if target in above:
        raise UserError(
            f"{link} of the corpus is a link to {target}, which contains it, so it has no end; "
            "remove it"
        )
    return target
