"""Each public name is documented, typed, and has an example that runs."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from lightning import Trainer

import lockstep

FACES = (
    *("callbacks", "checkpoints", "evaluation", "hub", "loggers", "mixtures", "plan", "run"),
    *("strategies", "tokens"),
)
VALUES = {"NUMERICS", "Order"}  # a number and a type: versions.py and order.py explain them
PUBLIC = sorted({*lockstep.__all__} - VALUES)
# Packages whose names a project may import.
PACKAGES = ["lockstep", *(f"lockstep.{each}" for each in FACES)]
# What examples need besides their own lines.
GIVEN = {"lockstep": lockstep, "torch": torch, "Trainer": Trainer}


@pytest.mark.parametrize("package", PACKAGES)
def test_all_names_are_those_that_types_and_imports_know(package):
    module = importlib.import_module(package)
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.asname or alias.name: (line.module, alias.name)
        for block in blocks
        for line in block.body
        for alias in line.names
    }
    assert {*imported} == {*module.__all__}
    assert {*module.__all__} == {*dir(module)}
    for name, (place, inner) in imported.items():
        assert getattr(module, name) is getattr(importlib.import_module(place), inner)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_its_arguments_are(name):
    public = getattr(lockstep, name)
    text = inspect.getdoc(public) or ""
    signature = inspect.signature(public)
    function = public.__init__ if inspect.isclass(public) else public
    typed = function.__annotations__
    for argument in signature.parameters.values():
        if argument.kind is not argument.VAR_KEYWORD and name != "Ranks":  # says each by a comment
            assert f"\n    {argument.name}: " in text, f"{name} does not say what {argument} is"
        assert argument.name in typed, f"{name}: {argument} has no type"


@pytest.mark.filterwarnings("ignore")  # of Lightning: a Trainer of an example trains nothing
@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    public = getattr(lockstep, name)
    examples = doctest.DocTestFinder(recurse=False).find(
        public, name, globs={**vars(inspect.getmodule(public)), **GIVEN}
    )
    lines = [each for found in examples for each in found.examples]
    assert lines, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    failures = [runner.run(found).failed for found in examples]
    assert not any(failures)
