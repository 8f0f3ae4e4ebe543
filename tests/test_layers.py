"""Imports only go downward, without cycles, and nothing outside extras names an extra."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from lockstep_gpt import extras

PACKAGE = extras.__name__.partition(".")[0]
ROOT = Path(extras.__file__).parents[1]
# From the bottom up; a module may import from layers before it, or from its own layer.
LAYERS = [
    "registry",
    "whole_files",
    "config",
    "run_directory",
    "processes",
    "model",
    "data",
    "runtime",
    "training",
    "inference",
    "launch",
    "cli",
    "__main__",
    "extras",
]
EXTRAS = sorted(
    path.name for path in (ROOT / "extras").iterdir() if (path / "__init__.py").exists()
)


@functools.cache
def modules():
    """Return every module of the package, by its name relative to the package."""
    files = {path.relative_to(ROOT).with_suffix(""): path for path in ROOT.rglob("*.py")}
    names = {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}
    return {name: path for name, path in names.items() if name != "__init__"}


def imports(path, at_start=False):
    """Yield our modules that a file imports, with or without imports in functions."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == PACKAGE:
            below = node.module.removeprefix(PACKAGE).lstrip(".")
            for alias in node.names:
                inner = ".".join(filter(None, [below, alias.name]))
                yield inner if inner in modules() else below


def layer(module):
    return LAYERS.index(module.partition(".")[0])


def test_every_module_belongs_to_a_layer():
    assert {name.partition(".")[0] for name in modules()} <= set(LAYERS)


def test_no_module_imports_from_a_layer_above_its_own():
    upward = [
        f"{name} imports {each}"
        for name, path in modules().items()
        for each in imports(path)
        if layer(each) > layer(name) and each != "extras"  # the empty folder itself
    ]
    assert upward == []


def test_no_imports_form_a_circle():
    graph = {name: set(imports(path, at_start=True)) - {name} for name, path in modules().items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) >= len(graph)


def test_an_extra_is_named_by_nothing_outside_it():
    for extra in EXTRAS:
        name = re.compile(rf"\bextras[./]{extra}\b|\bextras import {extra}\b")
        inside = ROOT / "extras" / extra
        named = [
            str(path)
            for path in ROOT.rglob("*.py")
            if not path.is_relative_to(inside) and name.search(path.read_text("utf-8"))
        ]
        assert named == [], extra
