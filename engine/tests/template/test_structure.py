"""The shape of our source: imports run downward, parts are short, and classes stay as written.

These rules are for this repository: a project's owner may shape the source in other ways.
Each rule lists its remaining exceptions. A list must be exact, so that it can only get shorter:
a test also fails if an exception in its list is no longer one.
"""

import ast
import functools
import graphlib
import re
import symtable
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml

SOURCE = Path(__file__).parents[3] / "src"
CONFIGS = SOURCE.with_name("configs")
PACKAGE = "lockstep_gpt"
# From the bottom up; a module may use layers before its own, and its own.
LAYERS = [
    "exits",
    "logs",
    "errors",
    "damaged_files",
    "whole_files",
    "settings",
    "batch",
    "schedule",
    "optional",
    "python_patches",
    "numpy_patches",
    "torch_patches",
    "lightning_patches",
    "omegaconf_patches",
    "processes",
    "standard_streams",
    "stop_signals",
    "building",
    "model",
    "loading",
    "tokens",
    "distributed",
    "run",
    "training",
    "launch",
    "gpt",
    "modern",
    "optim",
    "data",
    "module",
    "sample",
    "trained_model",
    "initial_weights",
    "measure",
    "generate",
    "evaluate",
    "prepare",
    "train",
    "programs",
    "testing",
    "cli",
    "__main__",
    "extras",
]
# The core runs an extra's command, and imports an extra when a setting needs it.
MAY_LOOK_UP = {
    "lockstep.commands",
    "lockstep_gpt.trained_model",
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
# A string that names a module, or a name in it: `package.module`, `package.module.name`,
# `package.module:name`, `.module:name`, or `.module`.
TARGET = re.compile(rf"({PACKAGE})?((?:\.\w+)+)(?::(\w+))?")


# The text of each file, by its path.
FILES = {
    path.relative_to(SOURCE).as_posix(): path.read_text("utf-8")
    for path in sorted(SOURCE.rglob("*.py"))
}
CORE = {
    file: text
    for file, text in FILES.items()
    if file.startswith(f"{PACKAGE}/") and not file.startswith(f"{PACKAGE}/extras/")
}


def modules(files: dict[str, str]) -> dict[str, str]:
    """Return the text of each module by its full name."""
    names = {file.removesuffix(".py").replace("/", "."): text for file, text in files.items()}
    return {name.removesuffix(".__init__"): text for name, text in names.items()}


ALL = modules(FILES)  # with Hydra's plugin
OURS = {name: text for name, text in ALL.items() if name.startswith(f"{PACKAGE}.")}
OF_CORE = {name: text for name, text in modules(CORE).items() if name in OURS}
EXTRAS = [name for name in OURS if re.fullmatch(rf"{PACKAGE}\.extras\.\w+", name)]


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def walk_at_start(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported: all but the bodies of functions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            yield from walk_at_start(node)


# Which module uses which


def imports(nodes: Iterable[ast.AST], modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules of ours that statements import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "import by the full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in [inner, node.module] if name in modules)


def targets(source: str, modules: Iterable[str]) -> Iterator[str]:
    """Yield the strings that name a module of ours, or a name in it, except keys of dicts."""
    nodes = list(ast.walk(parsed(source)))
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = TARGET.fullmatch(node.value)
            if found and id(node) not in keys | parts:
                is_sure = found[1] or found[3]  # else `.json` would be one, too
                if is_sure or f"{PACKAGE}{found[2]}" in modules:
                    yield node.value


def located(target: str, modules: Iterable[str]) -> tuple[str, str]:
    """Return the module and the name that a target names; both are empty if there is no such."""
    place = f"{PACKAGE}{target}" if target.startswith(".") else target
    module, colon, name = place.partition(":")
    if colon or module in modules:
        return (module, name) if module in modules else ("", "")
    module, _, name = module.rpartition(".")
    return (module, name) if module in modules else ("", "")


@functools.cache
def defined(source: str) -> set[str]:
    """Return the names that a module defines or imports."""
    symbols = symtable.symtable(source, "", "exec").get_symbols()
    return {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def missing(target: str, sources: dict[str, str]) -> bool:
    """Tell whether a target names a module that doesn't exist, or a name that it doesn't have."""
    module, name = located(target, sources)
    return not module or (bool(name) and name not in defined(sources[module]))


def uses(name: str, sources: dict[str, str]) -> set[str]:
    """Return the other modules that one imports anywhere, or names in strings."""
    source = sources[name]
    tree = parsed(source)
    named = {located(target, sources)[0] for target in targets(source, sources)}
    return {*imports(ast.walk(tree), sources), *named} - {name, ""}


def uses_at_start(name: str, sources: dict[str, str]) -> set[str]:
    """Return the other modules whose import begins with one's own."""
    tree = parsed(sources[name])
    types = for_types_only(tree)
    nodes = [node for node in walk_at_start(tree) if node not in types]
    return {*imports(nodes, sources)} - {name}


def for_types_only(tree: ast.Module) -> set[ast.AST]:
    """Return the statements that only a type checker sees."""
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {inner for block in blocks for node in block.body for inner in ast.walk(node)}


def layer(module: str) -> int:
    """Return the place of a module's layer."""
    return LAYERS.index(module.split(".")[1])


def may_look_up(name: str, used: str) -> bool:
    """Tell whether a module of the core may use an extra's."""
    return name in MAY_LOOK_UP and used.startswith(f"{PACKAGE}.extras.")


def upward(sources: dict[str, str]) -> list[str]:
    return [
        f"{name} uses {each}"
        for name in sources
        for each in sorted(uses(name, sources))
        if layer(each) > layer(name) and not may_look_up(name, each)
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle; an empty list if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


SYNTHETIC = {
    f"{PACKAGE}.loading.order": "import math\n",
    f"{PACKAGE}.training.train": "def fit(): ...\n",
}


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from lockstep_gpt.training import train", "training.train"),
        ("from lockstep_gpt.training.train import fit", "training.train"),
        ("import lockstep_gpt.training.train", "training.train"),
        ("def late():\n    from lockstep_gpt.training.train import fit", "training.train"),
        ('PLACE = ".training.train:fit"', "training.train"),
        ('PLACES = {"fit": (".training.train:fit", "a line of help")}', "training.train"),
        ('PLACE = "lockstep_gpt.training.train"', "training.train"),
        ('PLACE = "lockstep_gpt.training.train.fit"', "training.train"),
        ('PLACE = ".training.train"', "training.train"),
        ('MOVED = {"lockstep_gpt.training.train": ""}', ""),
        ('name = f"{file}.training.train"', ""),
        ('name = file.with_suffix(".json")', ""),
        ("import torch", ""),
    ],
)
def test_a_use_is_an_import_anywhere_or_a_string_that_names_a_module(source, used):
    sources = SYNTHETIC | {f"{PACKAGE}.loading.order": source}
    expected = [f"{PACKAGE}.{used}"] if used else []
    assert [*uses(f"{PACKAGE}.loading.order", sources)] == expected
    lines = [f"{PACKAGE}.loading.order uses {each}" for each in expected]
    assert upward(sources) == lines


def test_a_use_of_the_own_layer_or_of_one_below_is_not_upward():
    downward = {f"{PACKAGE}.training.train": "from lockstep.loading import order\n"}
    assert upward(SYNTHETIC | downward) == []
    beside = {f"{PACKAGE}.loading.windows": "from lockstep.loading import order\n"}
    assert upward(SYNTHETIC | beside) == []


@pytest.mark.parametrize(
    "target",
    [
        ".training.train:miss",
        ".training.miss:fit",
        "lockstep_gpt.training.miss.fit",
        "lockstep_gpt.x",
    ],
)
def test_a_target_without_its_module_or_name_is_missing(target):
    assert missing(target, SYNTHETIC)
    (found,) = targets(f'PLACE = "{target}"', SYNTHETIC)
    assert found == target


def test_two_modules_that_use_each_other_are_a_circle():
    one, two = SYNTHETIC
    late = {
        one: "def late():\n    from lockstep_gpt.training import train\n",
        two: 'PLACE = ".loading.order:late"\n',
    }
    assert {*circle({name: uses(name, late) for name in late})} == {one, two}
    assert circle({name: uses_at_start(name, late) for name in late}) == []
    early = {
        one: "try:\n    from lockstep_gpt.training import train\nfinally:\n    pass\n",
        two: "class Order:\n    from lockstep.loading import order\n",
    }
    assert {*circle({name: uses_at_start(name, early) for name in early})} == {one, two}


def test_every_module_belongs_to_a_layer_and_every_layer_has_one():
    assert {name.split(".")[1] for name in OURS} == set(LAYERS)


@pytest.mark.slow
def test_no_module_uses_a_layer_above_its_own():
    assert upward(OURS) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: uses_at_start(name, OURS) for name in OURS}) == []


def test_no_modules_of_the_core_use_each_other_in_a_circle_even_in_functions_or_by_name():
    assert circle({name: uses(name, OF_CORE) for name in OF_CORE}) == []


def test_every_string_that_names_a_module_of_ours_names_an_existing_one():
    named = {name: [*targets(source, OURS)] for name, source in OURS.items()}
    assert [*filter(None, named.values())]
    lost = [f"{name}: {each}" for name in named for each in named[name] if missing(each, OURS)]
    assert lost == []


def targets_in(node: object) -> Iterator[str]:
    """Yield the `_target_` values in the content of a YAML file."""
    if isinstance(node, dict):
        if isinstance(target := node.get("_target_"), str):
            yield target
        node = [*node.values()]
    if isinstance(node, list):
        for each in node:
            yield from targets_in(each)


def test_a_yaml_file_s_classes_are_found_at_any_depth():
    content = {"loggers": [{"mine": {"_target_": "lockstep_gpt.training.train.miss"}}]}
    (target,) = targets_in(content)
    assert missing(target, SYNTHETIC)


def test_every_class_of_ours_that_a_yaml_file_names_exists():
    paths = sorted(CONFIGS.rglob("*.yaml"))
    named = {path: [*targets_in(yaml.safe_load(path.read_text("utf-8")))] for path in paths}
    ours = tuple(f"{name.partition('.')[0]}." for name in ALL)
    found = [(path, each) for path in paths for each in named[path] if each.startswith(ours)]
    assert len(found) > 5
    assert [(path, each) for path, each in found if missing(each, ALL)] == []


def test_an_extra_is_named_by_few_modules_of_the_core():
    assert len(EXTRAS) == 5
    named = {name for name in OF_CORE if ".extras." in OF_CORE[name]}
    assert named == MAY_LOOK_UP | {f"{PACKAGE}.optional"}  # which imports them


# How long parts are


def long_functions(source: str, most: int) -> set[str]:
    """Return the names of functions that have more lines than `most`."""
    functions = (node for node in ast.walk(parsed(source)) if isinstance(node, FUNCTIONS))
    return {each.name for each in functions if each.end_lineno - each.lineno + 1 > most}


def test_a_function_s_lines_are_counted_from_its_head_to_its_end():
    source = (
        "class A:\n    def f(self):\n        async def g():\n            pass\n        return g\n"
    )
    assert long_functions(source, 1) == {"f", "g"}
    assert long_functions(source, 3) == {"f"}
    assert long_functions(source, 4) == set()


def without_empty(found: dict[str, set[str]]) -> dict[str, set[str]]:
    return {file: names for file, names in found.items() if names}


def test_functions_of_the_core_have_at_most_60_lines():
    long = {file: long_functions(source, 60) for file, source in CORE.items()}
    assert without_empty(long) == {}


# Classes stay as they are written


def changes_of_classes(source: str) -> set[str]:
    """Return the functions and classes in which a class is made or changed at run time."""
    return {place for place, node in with_places(parsed(source)) if changes_class(node)}


def with_places(tree: ast.AST, place: str = "the module") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node with the name of the innermost function or class that contains it."""
    for node in ast.iter_child_nodes(tree):
        yield place, node
        yield from with_places(node, node.name if isinstance(node, SCOPES) else place)


def changes_class(node: ast.AST) -> bool:
    """Tell whether a node makes a class without `class`, or gives an object another one."""
    if isinstance(node, ast.Attribute):
        return node.attr == "__class__" and not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in ("setattr", "__setattr__", "delattr"):
        return any(
            isinstance(each, ast.Constant) and each.value == "__class__" for each in node.args
        )
    return name in ("make_dataclass", "new_class") or (name == "type" and len(node.args) == 3)


@pytest.mark.parametrize(
    "line",
    [
        'return type("New", (Old,), {})',
        'return types.new_class("New", (Old,))',
        'return dataclasses.make_dataclass("New", ["one"])',
        "old.__class__ = New",
        "old.__class__, number = New, 1",
        'setattr(old, "__class__", New)',
    ],
)
def test_a_change_of_a_class_is_found_by_its_function(line):
    assert changes_of_classes(f"class A:\n    def f(old):\n        {line}\n") == {"f"}
    assert changes_of_classes(line.replace("return ", "")) == {"the module"}


@pytest.mark.parametrize(
    "line", ["type(old)", "old.__class__", "class New(Old): ...", "old.kind = 1"]
)
def test_reading_a_class_or_writing_one_is_no_change_of_it(line):
    assert changes_of_classes(line) == set()


def test_no_class_is_made_or_changed_at_run_time():
    changed = {file: changes_of_classes(source) for file, source in FILES.items()}
    assert without_empty(changed) == {}


# Private names of others


PRIVATE = re.compile(r"_[A-Za-z]\w*")
DOCUMENTED = {"_exit"}  # of `os`
# Methods of strings whose arguments are parts of names.
CUTS = ("endswith", "partition", "removeprefix", "removesuffix", "rpartition", "startswith")


def own_names(source: str) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, own attributes."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, SCOPES):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= {node.attr} if of_self else set()
    return found


def names_in(text: str) -> set[str]:
    """Return the names in a string that is a name or a path of names; otherwise, none.

    A keyword of Hydra, `_target_`, isn't private, and neither is a single word in capitals.
    """
    names = text.split(".")
    is_path = all(name.isidentifier() for name in names) and not text.endswith("_")
    return {*names} if is_path and (len(names) > 1 or text.islower()) else set()


def parts_of_names(node: ast.AST) -> list[ast.expr]:
    """Return the strings in a node that are only parts of others."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    is_cut = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.args if is_cut and node.func.attr in CUTS else []


def private_names(source: str, own: set[str]) -> set[str]:
    """Return the private names in a file that aren't `own`: attributes, imports, and strings."""
    nodes = [*ast.walk(parsed(source))]
    parts = {id(part) for node in nodes for part in parts_of_names(node)}
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = [part for alias in node.names for part in alias.name.split(".")]
            found |= {*names, *module.split(".")}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= names_in(node.value) if id(node) not in parts else set()
    return {name for name in found if PRIVATE.fullmatch(name)} - own - DOCUMENTED


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("trainer._results", "_results"),
        ("trainer._results = []", "_results"),
        ("from torch import _jit", "_jit"),
        ("from torch._dynamo import config", "_dynamo"),
        ("import torch._C", "_C"),
        ("torch._C._cuda_init()", "_C"),
        ('getattr(feed, "_iterator")', "_iterator"),
        ('import_module("torch._C.autograd")', "_C"),
        ("class A(Loop):\n    def f(self):\n        self._done()", "_done"),
    ],
)
def test_a_private_name_of_others_is_found_however_it_is_used(line, name):
    assert name in private_names(line, own_names(line))


@pytest.mark.parametrize(
    "line",
    [
        "def _own(): ...\nmodule._own()",
        "class A:\n    def f(self):\n        self._own = 1\n        return self._own",
        "_own = 1\nfrom lockstep.settings import _own",
        'settings["_target_"]',
        'f"{task}_stderr"',
        'name.removesuffix("_ATTENTION")',
        'name.removesuffix("_program")',
        '"a text with _words of a name"',
        "model.__class__.__name__",
        "os._exit(1)",
        "for _ in range(3): ...",
    ],
)
def test_names_of_ours_and_texts_are_no_private_names_of_others(line):
    assert private_names(line, own_names(line)) == set()


def test_private_names_of_others_are_only_in_patches():
    own = set().union(*map(own_names, FILES.values()))
    files = {name: text for name, text in FILES.items() if not name.endswith("_patches.py")}
    assert without_empty({name: private_names(text, own) for name, text in files.items()}) == {
        "lockstep_gpt/distributed/ddp.py": {"_foreach_zero_"},
        "lockstep_gpt/distributed/exact_sums.py": {
            "_foreach_add_",
            "_foreach_mul_",
        },
        "lockstep_gpt/distributed/flight_recorder.py": {
            "_C",
            "_distributed_c10d",
            "_dump_fr_trace",
            "_dump_nccl_trace",
        },
        "lockstep_gpt/extras/cluster/examination.py": {"_C", "_distributed_c10d"},
        "lockstep_gpt/extras/cluster/meeting.py": {"_C", "_distributed_c10d"},
        "lockstep_gpt/extras/cluster/tracing.py": {
            "_cdata",
            "_python_dispatch",
            "_pytree",
            "_subclasses",
        },
        "lockstep_gpt/extras/pages/recording.py": {"_foreach_norm"},
        # A name in a text that is read, not one that is used.
        "lockstep_gpt/launch/signatures.py": {"_defaults_from_env_vars"},
        "lockstep_gpt/training/counted_targets.py": {"_foreach_mul_"},
        "lockstep_gpt/training/matrix_placement.py": {
            "_foreach_add_",
            "_foreach_copy_",
            "_foreach_mul_",
        },
        "lockstep_gpt/training/muon.py": {"_foreach_add_"},
    }
