"""Finds a `_target_` that doesn't exist, without importing what it names, such as torch."""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from lockstep_gpt.catalog import extra_of_target, how_to_add
from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.optional import refuse_absent

# Code that can give a module names which its text doesn't show.
HIDDEN_NAMES = re.compile(
    rb"import \*|__getattr__(?!\(self)|globals\(|sys\.modules|\bexec\(|\bvars\(\)"
)
# Lightning's logger -> its library, an optional dependency of the same name.
TRACKERS = {"MLFlowLogger": "mlflow", "TensorBoardLogger": "tensorboard"}


def refuse_missing(config: Config) -> None:
    """Raise a `UserError` for a `_target_` that ranks could not import."""
    nodes = {
        "callbacks": config.callbacks,
        "data": {"_target_": config.data._target_},
        "logger": config.logger,
        "module": config.module,
        "packing": {"_target_": config.packing._target_},
        "strategy": config.strategy,
        "trainer": config.trainer,
    }
    for group, node in nodes.items():
        for name, target in _targets(node, group):
            mistake = _mistake_in(target)
            if mistake:
                raise UserError(f"{name}={target}: {mistake}")


def refuse_absent_trackers(config: Config) -> None:
    """Raise a `UserError` if a chosen tracker's library is not installed."""
    for _, target in _targets(config.logger, "logger"):
        library = TRACKERS.get(target.removeprefix("lightning.pytorch.loggers."))
        if library is not None:
            refuse_absent(f"logger={library}", library, library)


def _targets(node: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each `_target_` in a node."""
    if isinstance(node, list):
        for index, child in enumerate(node):
            yield from _targets(child, f"{name}.{index}")
    if not isinstance(node, dict):
        return
    for key, child in node.items():
        if key == "_target_" and isinstance(child, str):
            yield f"{name}._target_", child
        yield from _targets(child, f"{name}.{key}")


def _mistake_in(target: str) -> str | None:
    """Return which part of a dotted name is missing; None if none is, or if only imports tell."""
    words = target.split(".")
    if not all(word.isidentifier() for word in words):
        return None  # Hydra says what is wrong with it
    if words[0] == "__main__":
        return None  # of a notebook
    extra = extra_of_target(target)
    if extra is not None:
        return f"needs {how_to_add(extra)}"
    top = words[0]
    module = _top_module(top)
    if module is None:
        installed = metadata.packages_distributions()
        return f"there is no module {top}{_suggestion(top, installed)}"
    for word in words[1:]:
        try:
            child = _submodule(module, word)
        except KeyError:  # of a namespace package inside of one that isn't imported
            return None
        if child is None:
            names = _names_in(module)
            if names is None or word in names:
                return None
            siblings = [*names, *_submodules(module)]
            return f"{module.name} has no {word}{_suggestion(word, siblings)}"
        module = child
    return None


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"; did you mean {near[0]}?" if near else "; correct it"


def _top_module(name: str) -> ModuleSpec | None:
    """Return where a module is that is in no package; ranks also find those in their folder."""
    return importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])


def _submodule(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return where a module of a package is. `importlib.util.find_spec` imports the package."""
    if package.submodule_search_locations is None:
        return None
    path = f"{package.name}.{name}"
    specs = (
        finder.find_spec(path, package.submodule_search_locations)
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )
    return next((spec for spec in specs if spec is not None), None)


def _submodules(package: ModuleSpec) -> list[str]:
    folders = package.submodule_search_locations
    return [] if folders is None else [module.name for module in pkgutil.iter_modules(folders)]


def _names_in(module: ModuleSpec) -> frozenset[str] | None:
    """Return a module's names besides its submodules; None if its text doesn't show them all."""
    if module.origin is None:  # a package without a file of its own
        return frozenset()
    return _names_in_file(Path(module.origin))


@cache
def _names_in_file(file: Path) -> frozenset[str] | None:
    if file.suffix != ".py":  # a module in C
        return None
    code = file.read_bytes()
    if HIDDEN_NAMES.search(code):
        return None
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError):  # the rank's error says where
        return None
    return frozenset(name for statement in statements for name in _bound_names(statement))


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module binds, in any of its branches."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
