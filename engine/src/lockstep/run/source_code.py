"""Which files compute a run, the project's and the engine's, and which of them have changed."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import project
from lockstep.run.directory import some_of

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

ENGINE = Path(__file__).resolve().parents[1]
# Folders and files of the engine that compute a step.
COMPUTING = ("batch.py", "callbacks/clipping.py", "functional.py", "muon/", "schedule.py")
PREFIX = "lockstep/"  # of the engine's files, in front of their paths
FUNCTIONS = f"{PREFIX}functional.py"  # of the engine, that models call


def file_hashes() -> dict[str, str]:
    """Return 8 hex digits for the content of each file that computes a step, by its path.

    Of the project, these are the modules that this process has imported.
    """
    paths = [ENGINE / name for name in COMPUTING]
    files = [file for path in paths for file in [path, *path.rglob("*.py")] if file.is_file()]
    names = sorted(filter(None, map(_name_of, {*files, *_imported()})))
    return {name: digest for name in names if (digest := hash_of(name)) is not None}


def _imported() -> Iterator[Path]:
    """Yield the project's files that this process has imported."""
    ours = project.found()
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if ours is not None and file and name.partition(".")[0] == ours.package:
            yield Path(file).resolve()


def _folder() -> Path | None:
    """Return the project's package."""
    ours = project.found()
    package = None if ours is None else sys.modules.get(ours.package)
    file = getattr(package, "__file__", None)
    return Path(file).resolve().parent if file else None


def _name_of(file: Path) -> str | None:
    """Return the path of a file in the project, or of the engine; None: it is of neither."""
    folder = _folder()
    if folder is not None and file.is_relative_to(folder):
        return file.relative_to(folder).as_posix()
    if file.is_relative_to(ENGINE):
        return f"{PREFIX}{file.relative_to(ENGINE).as_posix()}"
    return None


def hash_of(name: str) -> str | None:
    """Return 8 hex digits of a file by its name in `file_hashes`; None: it is gone."""
    folder = ENGINE if name.startswith(PREFIX) else _folder()
    if folder is None:
        return None
    try:
        content = (folder / name.removeprefix(PREFIX)).read_bytes()
    except OSError:
        return None
    return hashlib.sha256(content).hexdigest()[:8]


def changes_since(
    before: Mapping[str, str] | None, names: Collection[str] | None = None
) -> str | None:
    """Name the files of a run that are different now or gone.

    A new file can compute nothing for the run unless one of these files changes, too.

    Args:
        before: the run's `file_hashes()`; None if an earlier version has kept none.
        names: those that matter; None: all.

    Returns:
        up to three names, and how many others there are; None if no file differs.
    """
    changed = [
        name
        for name, digest in sorted((before or {}).items())
        if (names is None or name in names) and hash_of(name) != digest
    ]
    return some_of(changed) if changed else None


def tell_changes(path: Path, content: Mapping[str, Any], model: nn.Module) -> None:
    """Warn if the code of a model has changed since it was trained.

    Args:
        path: of the checkpoint.
        content: of the checkpoint.
        model: built for its weights.
    """
    starts = content.get("arithmetic") or {}
    trained_by = starts[max(starts)].get("code") if starts else None
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files = {Path(sys.modules[kind.__module__].__file__ or "") for kind in kinds if _has_file(kind)}
    names = {FUNCTIONS, *filter(None, (_name_of(file.resolve()) for file in files))}
    changed = changes_since(trained_by, names)
    if changed and os.environ.get("RANK", "0") == "0":  # under torchrun, one of the ranks
        logger.warning("changed since %s was trained: %s", path, changed)


def _has_file(kind: type) -> bool:
    module = inspect.getmodule(kind)
    return getattr(module, "__file__", None) is not None
