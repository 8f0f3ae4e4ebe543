"""Which files compute a run, and which of them have changed since.

These are the project's files that a rank has imported, and the engine's that change weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lockstep import project
from lockstep.run.directory import some_of

logger = logging.getLogger(__name__)

ENGINE = Path(__file__).resolve().parents[1]
# The engine's folders and files that compute updates.
COMPUTING = (
    "callbacks/clipping.py",
    "callbacks/counted_targets.py",
    "callbacks/seeds.py",
    "callbacks/step_rate.py",
    "functional.py",
    "muon/",
)


@cache
def file_hashes() -> dict[str, str]:
    """Return 8 hex digits for the content of each file that computes a step, by its name.

    A name begins with the package, as in `my_gpt/gpt.py`; outside of a project, it is a path.
    """
    paths = [ENGINE / name for name in COMPUTING]
    files = [file for path in paths for file in [path, *path.rglob("*.py")] if file.is_file()]
    names = [_name_of(file) for file in [*files, *_imported()]]
    hashes = {name: _hash_of(name) for name in sorted(names)}
    return {name: content for name, content in hashes.items() if content is not None}


def changes_since(
    before: Mapping[str, str] | None, places: Iterable[str] | None = None
) -> str | None:
    """Name the files of a run in these places that are different now or gone.

    A new file can compute nothing for the run unless one of these files changes, too.

    Args:
        before: the run's `file_hashes()`; None if an earlier version has kept none.
        places: beginnings of names; None: all.

    Returns:
        up to three names, and how many others there are; None if no file differs.
    """
    if before is None:
        return None
    chosen = ("",) if places is None else tuple(places)
    names = sorted(name for name in before if name.startswith(chosen))
    changed = [name for name in names if before[name] != _hash_of(name)]
    return some_of(changed) if changed else None


def files_of(model: Any) -> list[str]:
    """Return the names of the files that define the layers of a model, without libraries'."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    files = [Path(inspect.getfile(each)).resolve() for each in classes if _has_file(each)]
    return sorted({_name_of(file) for file in files if _is_ours(file)})


def _has_file(kind: type) -> bool:
    """Return whether a class is in a file, not in a library's compiled part."""
    return getattr(sys.modules.get(kind.__module__), "__file__", None) is not None


def tell_changes(path: Path, content: Mapping[str, Any], model: Any) -> None:
    """Warn if the code of a model has changed since it was trained.

    Args:
        path: of the checkpoint.
        content: of the checkpoint.
        model: built for its weights.
    """
    starts = content.get("arithmetic") or {}
    trained_by = starts[max(starts)].get("code") if starts else None
    changed = changes_since(trained_by, files_of(model))
    if changed and os.environ.get("RANK", "0") == "0":  # under torchrun, one of the ranks
        logger.warning("changed since %s was trained: %s", path, changed)


def _imported() -> list[Path]:
    """Return the files that this process has imported from the project, or from its folder."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    paths = {Path(file).resolve() for file in files if file and file.endswith(".py")}
    return [path for path in paths if _is_ours(path) and not path.is_relative_to(ENGINE)]


def _is_ours(file: Path) -> bool:
    """Return whether this is a file of the project or the engine, not of a library."""
    if file.is_relative_to(ENGINE):
        return True
    package = project.package()
    folder = Path.cwd() if package is None else _folder_of(package)
    is_library = "site-packages" in file.parts
    return folder is not None and file.is_relative_to(folder) and not is_library


def _name_of(file: Path) -> str:
    """Return the name of a file: from its package on, or its path from here."""
    for package in filter(None, ["lockstep", project.package()]):
        folder = _folder_of(package)
        if folder is not None and file.is_relative_to(folder):
            return (Path(package) / file.relative_to(folder)).as_posix()
    return file.relative_to(Path.cwd()).as_posix()


def _hash_of(name: str) -> str | None:
    """Return the hash of a named file's content now; None if it is gone."""
    package, _, rest = name.partition("/")
    folder = _folder_of(package)
    file = Path(name) if folder is None or not rest else folder / rest
    if not file.is_file():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]


@cache
def _folder_of(package: str) -> Path | None:
    if not package.isidentifier():
        return None
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return Path(folders[0]).resolve() if folders else None
