"""`data=stdlib`: the source code of the running Python's standard library."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.tokens.sources.file_documents import FileDocuments
from lockstep.tokens.sources.files import File, Files

# Installed packages aren't the library; tests are long, repetitive, and sometimes invalid code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class StandardLibrary(FileDocuments):
    """The `.py` files of the standard library, except `LEFT_OUT`; each is a document."""

    kind: ClassVar[str] = "stdlib"

    @cached_property
    def file_groups(self) -> list[Files]:
        """The files; raises a `UserError` if there are none."""
        folder = sysconfig.get_path("stdlib")
        files = sorted(files_below(folder, ".py", LEFT_OUT), key=lambda file: file.name)
        if not files:
            raise UserError(
                f"data=stdlib finds no .py file under {folder}; use a Python whose library is in "
                "files, or data=text"
            )
        return [Files(files)]

    @property
    def by_name(self) -> bool:
        """Whole files are held out."""
        return True

    def identity(self) -> Any:
        """Return Python's version, names, and sizes: a new container layer changes only times."""
        return [sys.version.split()[0], *(file[:2] for file in self.files)]


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
