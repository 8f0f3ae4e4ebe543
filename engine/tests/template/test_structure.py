"""The shape of our source: imports run downward, parts are short, and classes stay as written.

The engine knows nothing of the project, and the project uses the engine's public names. These rules
are for this repository: a project's owner may shape the source in other ways. Each rule lists its
remaining exceptions. A list must be exact, so that it can only get shorter: a test also fails if an
exception in its list is no longer one.
"""

import ast
import functools
import graphlib
import re
import symtable
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

import lockstep

ROOT = Path(__file__).parents[3]
ENGINE, PROJECT = "lockstep", "lockstep_gpt"
SOURCES = {ENGINE: ROOT / "engine/src", PROJECT: ROOT / "src"}
CONFIGS = (ROOT / "configs", ROOT / "engine/src/lockstep/configs")
# Of the engine, from the bottom up; a module may use layers before its own, and its own. Folders
# side by side in a layer may use each other, but no modules do so in a circle. A module may have a
# place of its own.
LAYERS = [
    "lazy",
    "exits",
    "logs",
    "versions",
    "standard_streams",
    "errors",
    "optional",
    "damaged_files",
    "file_systems",
    "whole_files",
    "settings variables",
    "batch",
    "schedule",
    "functional",
    "project",
    "command_line",
    "ranks",
    "patches",
    "processes",
    "stop_signals",
    "building",
    "loading",
    "tokens",
    "strategies",
    "muon",
    "callbacks checkpoints loggers memory metrics run",  # a run and its parts
    "mixtures",
    "configs",
    "launch",
    "tokens.command",
    "testing",
    "plan",
    "cluster",
    "evaluation",
    "hub",
    "pages",
    "evidence",
    "commands",
    "__main__",
]
# Features on top of the engine's core.
OPTIONAL = {"__main__", "cluster", "commands", "evidence", "hub", "mixtures", "pages", "plan"}
# The program of a worker, which evidence starts, runs a command as the shell would.
MAY_LOOK_UP = {"lockstep.evidence.workers": "lockstep.commands"}
# Of the engine, besides `lockstep` itself, what a project may use; `*` stands for what is inside.
PUBLIC = (
    "lockstep.callbacks",
    "lockstep.checkpoints",
    "lockstep.command_line",
    "lockstep.commands",
    "lockstep.errors",
    "lockstep.evaluation",
    "lockstep.functional",
    "lockstep.hub",
    "lockstep.hub.gpt2",
    "lockstep.loading.*",
    "lockstep.loggers",
    "lockstep.mixtures",
    "lockstep.project",
    "lockstep.run",
    "lockstep.settings",
    "lockstep.strategies",
    "lockstep.tokens",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
# A string that names a module, or a name in it: `package.module`, `package.module.name`, or
# `package.module:name`.
TARGET = re.compile(rf"({ENGINE}|{PROJECT})((?:\.\w+)+)(?::(\w+))?")


# The text of each file, by its path.
FILES = {
    path.relative_to(source).as_posix(): path.read_text("utf-8")
    for source in SOURCES.values()
    for path in sorted(source.rglob("*.py"))
}


def modules(files: dict[str, str]) -> dict[str, str]:
    """Return the text of each module by its full name."""
    names = {file.removesuffix(".py").replace("/", "."): text for file, text in files.items()}
    return {name.removesuffix(".__init__"): text for name, text in names.items()}


ALL = modules(FILES)  # with Hydra's plugins
OF_ENGINE = {name: text for name, text in ALL.items() if name.startswith(f"{ENGINE}.")}
OF_PROJECT = {name: text for name, text in ALL.items() if name.split(".")[0] == PROJECT}


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


def targets(source: str) -> Iterator[str]:
    """Yield the strings that name a module of ours, or a name in it, except keys of dicts."""
    nodes = list(ast.walk(parsed(source)))
    keys = {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and TARGET.fullmatch(node.value) and id(node) not in keys | parts:
            yield node.value


def located(target: str, modules: Iterable[str]) -> tuple[str, str]:
    """Return the module and the name that a target names; both are empty if there is no such."""
    module, colon, name = target.partition(":")
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
    """Return the other modules that one imports anywhere, or names in strings.

    The packages that it is in don't count: `from PACKAGE import MODULE` uses a module.
    """
    source = sources[name]
    named = {located(target, sources)[0] for target in targets(source)}
    used = {*imports(ast.walk(parsed(source)), sources), *named} - {name, ""}
    outer = {name[:at] for at, letter in enumerate(name) if letter == "."}
    return used - {MAY_LOOK_UP.get(name)} - outer


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


def places() -> dict[str, int]:
    """Return the place of each folder and of each module that has its own."""
    return {name: place for place, names in enumerate(LAYERS) for name in names.split()}


def layer(module: str) -> int:
    """Return the place of a module's layer."""
    inner = module.partition(".")[2]
    return places().get(inner, places()[inner.partition(".")[0]])


def upward(sources: dict[str, str]) -> list[str]:
    return [
        f"{name} uses {each}"
        for name in sources
        for each in sorted(uses(name, sources))
        if layer(each) > layer(name)
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of a circle; an empty list if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


SYNTHETIC = {
    "lockstep.loading.order": "import math\n",
    "lockstep.run.run": "def fit(): ...\n",
}


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from lockstep.run import run", "run.run"),
        ("from lockstep.run.run import fit", "run.run"),
        ("import lockstep.run.run", "run.run"),
        ("def late():\n    from lockstep.run.run import fit", "run.run"),
        ('PLACE = "lockstep.run.run:fit"', "run.run"),
        ('PLACES = {"fit": ("lockstep.run.run:fit", "a line of help")}', "run.run"),
        ('PLACE = "lockstep.run.run"', "run.run"),
        ('PLACE = "lockstep.run.run.fit"', "run.run"),
        ('MOVED = {"lockstep.run.run": ""}', ""),
        ('name = f"{file}.run.run"', ""),
        ("import torch", ""),
    ],
)
def test_a_use_is_an_import_anywhere_or_a_string_that_names_a_module(source, used):
    sources = SYNTHETIC | {"lockstep.loading.order": source}
    expected = [f"lockstep.{used}"] if used else []
    assert [*uses("lockstep.loading.order", sources)] == expected
    lines = [f"lockstep.loading.order uses {each}" for each in expected]
    assert upward(sources) == lines


def test_a_use_of_the_own_layer_or_of_one_below_is_not_upward():
    for name in ("lockstep.run.run", "lockstep.loading.windows"):
        downward = {name: "from lockstep.loading import order\n"}
        assert upward(SYNTHETIC | downward) == []
    beside = {"lockstep.callbacks.seeds": "from lockstep.run import run\n"}
    assert upward(SYNTHETIC | beside) == []


@pytest.mark.parametrize(
    "target",
    ["lockstep.run.run:miss", "lockstep.run.miss:fit", "lockstep.run.miss.fit", "lockstep.x"],
)
def test_a_target_without_its_module_or_name_is_missing(target):
    assert missing(target, SYNTHETIC)
    (found,) = targets(f'PLACE = "{target}"')
    assert found == target


def test_two_modules_that_use_each_other_are_a_circle():
    one, two = SYNTHETIC
    late = {
        one: "def late():\n    from lockstep.run import run\n",
        two: 'PLACE = "lockstep.loading.order:late"\n',
    }
    assert {*circle({name: uses(name, late) for name in late})} == {one, two}
    assert circle({name: uses_at_start(name, late) for name in late}) == []
    early = {
        one: "try:\n    from lockstep.run import run\nfinally:\n    pass\n",
        two: "class Order:\n    from lockstep.loading import order\n",
    }
    assert {*circle({name: uses_at_start(name, early) for name in early})} == {one, two}


def test_every_module_of_the_engine_belongs_to_a_layer_and_every_layer_has_one():
    inner = {name.partition(".")[2] for name in OF_ENGINE}
    folders = {name.partition(".")[0] for name in inner}
    assert {name for name in places() if "." not in name} == folders
    assert {name for name in places() if "." in name} <= inner
    assert len(places()) == sum(len(names.split()) for names in LAYERS)


@pytest.mark.slow
def test_no_module_of_the_engine_uses_a_layer_above_its_own():
    assert upward(OF_ENGINE) == []


def test_only_the_named_program_looks_up():
    for name, used in MAY_LOOK_UP.items():
        assert used in imports(ast.walk(parsed(ALL[name])), ALL)
        assert layer(used) > layer(name)


def test_no_modules_import_each_other_in_a_circle():
    assert circle({name: uses_at_start(name, ALL) for name in ALL}) == []


def test_no_modules_of_the_core_use_each_other_in_a_circle_even_in_functions_or_by_name():
    core = {name: OF_ENGINE[name] for name in OF_ENGINE if name.split(".")[1] not in OPTIONAL}
    assert circle({name: uses(name, core) for name in core}) == []


def test_the_engine_never_names_the_project():
    """Neither in its source nor in its choices and pages."""
    files = [path for path in SOURCES[ENGINE].rglob("*") if path.is_file()]
    texts = {path: path.read_text("utf-8") for path in files if "__pycache__" not in path.parts}
    named = re.compile(r"lockstep[-_]gpt|\blockstep gpt", re.IGNORECASE)
    assert [str(path) for path, text in texts.items() if named.search(text)] == []


def engine_s(source: str) -> set[str]:
    """Return the modules of the engine that a module of the project uses, and public names."""
    return {name for name in uses_in(source) if name.split(".")[0] == ENGINE}


def uses_in(source: str) -> set[str]:
    nodes = [*ast.walk(parsed(source))]
    named = {located(target, ALL)[0] for target in targets(source)}
    attributes = {
        f"{ENGINE}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == ENGINE
    }
    return {*imports(nodes, ALL), *named, *attributes} - {""}


def is_public(name: str) -> bool:
    names = {f"{ENGINE}.{each}" for each in lockstep.__all__}
    return name in {ENGINE, *names} or any(fnmatchcase(name, each) for each in PUBLIC)


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from lockstep.run import lock", {"lockstep.run", "lockstep.run.lock"}),
        ("import lockstep\nlockstep.Mean()", {"lockstep", "lockstep.Mean"}),
        ("import lockstep\nlockstep.run.lock", {"lockstep", "lockstep.run"}),
        ('PLACE = "lockstep.run.lock:Lock"', {"lockstep.run.lock"}),
        ("import torch", set()),
    ],
)
def test_what_the_project_uses_is_found_however_it_is_named(source, used):
    assert engine_s(source) == used


def test_the_project_uses_public_names_of_the_engine_only():
    used = set().union(*(engine_s(source) for source in OF_PROJECT.values()))
    of_yaml = {
        located(target, ALL)[0] if not is_public(target) else target
        for path in CONFIGS[0].rglob("*.yaml")
        for target in targets_in(yaml.safe_load(path.read_text("utf-8")))
        if target.startswith(f"{ENGINE}.")
    }
    packages = {name for name in ALL if any(each.startswith(f"{name}.") for each in ALL)}
    private = {name for name in used | of_yaml if not is_public(name)} - packages
    assert private == set()


def test_every_string_that_names_a_module_of_ours_names_an_existing_one():
    named = {name: [*targets(source)] for name, source in ALL.items()}
    assert [*filter(None, named.values())]
    lost = [f"{name}: {each}" for name in named for each in named[name] if missing(each, ALL)]
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
    content = {"loggers": [{"mine": {"_target_": "lockstep.run.run.miss"}}]}
    (target,) = targets_in(content)
    assert missing(target, SYNTHETIC)


def test_every_class_of_ours_that_a_yaml_file_names_exists():
    paths = [path for configs in CONFIGS for path in sorted(configs.rglob("*.yaml"))]
    named = {path: [*targets_in(yaml.safe_load(path.read_text("utf-8")))] for path in paths}
    ours = tuple(f"{name.partition('.')[0]}." for name in ALL)
    found = [(path, each) for path in paths for each in named[path] if each.startswith(ours)]
    assert len(found) > 5
    assert [(path, each) for path, each in found if missing(each, ALL)] == []


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


def test_functions_have_at_most_60_lines():
    long = {file: long_functions(source, 60) for file, source in FILES.items()}
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
    files = {name: text for name, text in FILES.items() if "/patches/" not in name}
    assert without_empty({name: private_names(text, own) for name, text in files.items()}) == {
        "lockstep/callbacks/counted_targets.py": {"_foreach_mul_"},
        "lockstep/cluster/examination.py": {"_C", "_distributed_c10d"},
        "lockstep/cluster/meeting.py": {"_C", "_distributed_c10d"},
        # A name in a text that is read, not one that is used.
        "lockstep/launch/signatures.py": {"_defaults_from_env_vars"},
        "lockstep/muon/optimizer.py": {"_foreach_add_"},
        "lockstep/muon/placement.py": {
            "_foreach_add_",
            "_foreach_copy_",
            "_foreach_mul_",
        },
        "lockstep/pages/recording.py": {"_foreach_norm"},
        "lockstep/plan/counting.py": {
            "_cdata",
            "_python_dispatch",
            "_pytree",
            "_subclasses",
        },
        "lockstep/ranks/flight_recorder.py": {
            "_C",
            "_distributed_c10d",
            "_dump_fr_trace",
            "_dump_nccl_trace",
        },
        "lockstep/strategies/ddp.py": {"_foreach_zero_"},
        "lockstep/strategies/exact_sums.py": {
            "_foreach_add_",
            "_foreach_mul_",
        },
    }
