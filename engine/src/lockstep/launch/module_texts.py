"""What a module's text says, without importing it: where it is, and what its names stand for."""

import ast
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# Code that can give a module names which its text doesn't show.
HIDDEN_NAMES = re.compile(
    rb"import \*|__getattr__(?!\(self)|globals\(|sys\.modules|\bexec\(|\bvars\(\)"
)
# Code that can change what a name stands for, or how a class is called, after its definition.
HIDDEN_CHANGES = re.compile(
    rb"\bglobals\(|\bexec\(|\bvars\(\)|setattr\(sys\.modules|"
    rb"\.__(?:init|new|signature)__\s*=(?!=)|"
    rb"setattr\([^()]*['\"]__(?:init|new|signature)__['\"]"
)


@dataclass(frozen=True)
class Binding:
    """A statement that gives a name its meaning in a module or a class."""

    statement: ast.stmt
    only_for_types: bool  # in `if TYPE_CHECKING:`


Bindings = dict[str, list[Binding]]


@dataclass(frozen=True)
class Text:
    """A module's text, read once for each of its versions."""

    code: bytes
    bindings: Bindings
    is_changed: bool  # whether something at import may change what it binds
    stars: tuple[ast.ImportFrom, ...]  # each `from x import *`
    exported: frozenset[str] | None  # the names in `__all__`; None: it has none, or isn't plain


def find_module(dotted: str) -> ModuleSpec | None:
    """Return where a module is; ranks also find those in the folder where they start."""
    top, *others = dotted.split(".")
    module = top_module(top)
    for word in others:
        if module is None:
            return None
        module = submodule(module, word)
    return module


def top_module(name: str) -> ModuleSpec | None:
    """Return where a module is that is in no package."""
    return importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])


def submodule(package: ModuleSpec, name: str) -> ModuleSpec | None:
    """Return where a module of a package is. `importlib.util.find_spec` imports the package.

    Raises:
        KeyError: it is in a namespace package inside of one that isn't imported.
    """
    if package.submodule_search_locations is None:
        return None
    path = f"{package.name}.{name}"
    specs = (
        finder.find_spec(path, package.submodule_search_locations)
        for finder in sys.meta_path
        if hasattr(finder, "find_spec")
    )
    return next((spec for spec in specs if spec is not None), None)


def submodules(package: ModuleSpec) -> list[str]:
    """Return the names of a package's modules."""
    folders = package.submodule_search_locations
    return [] if folders is None else [module.name for module in pkgutil.iter_modules(folders)]


def names_in(module: ModuleSpec) -> frozenset[str] | None:
    """Return a module's names besides its submodules; None if its text doesn't show them all."""
    if module.origin is None:  # a package without a file of its own
        return frozenset()
    text = text_of(module)
    if text is None or HIDDEN_NAMES.search(text.code):
        return None
    return frozenset(text.bindings)


def code_of(module: ModuleSpec) -> bytes | None:
    """Return a module's text; None if it has none, as one in C."""
    file = Path(module.origin or "")
    if file.suffix != ".py":
        return None
    try:
        version = file.stat()
        return _read(file, version.st_mtime_ns, version.st_size)
    except OSError:  # such as a module in an archive
        return None


@cache
def _read(file: Path, _mtime: int, _size: int) -> bytes:
    """Return a file's bytes. Someone who works in a notebook may change it between two calls."""
    return file.read_bytes()


def text_of(module: ModuleSpec) -> Text | None:
    """Return what a module's text binds; None if it has no text, or isn't Python."""
    code = code_of(module)
    return None if code is None else _parse(code)


@cache
def _parse(code: bytes) -> Text | None:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # the rank's error says where
        return None
    stars = tuple(
        statement
        for statement, _ in _statements(tree.body)
        if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"
    )
    bindings = bindings_in(tree.body)
    return Text(code, bindings, _is_changed(code, tree), stars, _exported(bindings))


def _is_changed(code: bytes, tree: ast.Module) -> bool:
    """Return whether a module, when imported, may change what its own names stand for.

    Code in a function or a class counts if the module's own statements or decorators use it.
    """
    lines = {code.count(b"\n", 0, found.start()) + 1 for found in HIDDEN_CHANGES.finditer(code)}
    if not lines:
        return False
    changing: set[str] = set()
    used: set[str] = set()
    for statement in tree.body:
        is_there = not lines.isdisjoint(range(statement.lineno, (statement.end_lineno or 0) + 1))
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if is_there:
                changing.add(statement.name)
            run_at_import: list[ast.expr] = statement.decorator_list
            used |= {name for node in run_at_import for name in _names(node)}
        else:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_there and not is_text:
                return True
            used |= {*_names(statement)}
    return not changing.isdisjoint(used)


def _names(tree: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def hides_submodule(package: ModuleSpec, name: str) -> bool:
    """Return whether a package's text may bind the name of a submodule to something else.

    It looks without parsing, since the text of torch takes a tenth of a second.
    """
    code = code_of(package)
    if code is None:
        return package.origin is not None  # a package without a file of its own binds nothing
    word = re.escape(name.encode())
    if re.search(rb"^\s*(?:(?:async\s+)?def|class)\s+%b\b" % word, code, re.MULTILINE):
        return True
    if re.search(rb"^\s*%b\s*(?::[^=\n]+)?=(?!=)" % word, code, re.MULTILINE):
        return True
    own = (b".", package.name.encode())
    same = (name.encode(), b"%b.%b" % (own[1], name.encode()))
    if any(found[1] not in same for found in re.finditer(rb"(\S+)\s+as\s+%b\b" % word, code)):
        return True
    imports = re.finditer(rb"\bfrom\s+(\S+)\s+import\s+(\([^)]*\)|[^\n]*)", code)
    return any(found[1] not in own and re.search(rb"\b%b\b" % word, found[2]) for found in imports)


def _exported(bindings: Bindings) -> frozenset[str] | None:
    match bindings.get("__all__"):
        case [Binding(statement=ast.Assign(value=ast.List() | ast.Tuple() as value))]:
            try:
                return frozenset(ast.literal_eval(value))
            except (ValueError, TypeError):
                return None
    return None


def bindings_in(body: list[ast.stmt]) -> Bindings:
    """Return each name that statements bind, in any of their branches, with these statements."""
    bindings: Bindings = {}
    for statement, only_for_types in _statements(body):
        for name in _bound_names(statement):
            bindings.setdefault(name, []).append(Binding(statement, only_for_types))
    return bindings


def _statements(
    body: list[ast.stmt], *, only_for_types: bool = False
) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements and those in their branches, with whether only type checkers read them."""
    for statement in body:
        yield statement, only_for_types
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # the names in it are its own
        is_for_types = isinstance(statement, ast.If) and _last_word(statement.test) == (
            "TYPE_CHECKING"
        )
        for field, branch in ast.iter_fields(statement):
            if isinstance(branch, list):
                inner = only_for_types or (is_for_types and field == "body")
                yield from _statements(_of_branch(branch), only_for_types=inner)


def _of_branch(branch: list[ast.AST]) -> list[ast.stmt]:
    """Return the statements of a branch, a list of exceptions' handlers, or cases of a `match`."""
    found: list[ast.stmt] = []
    for node in branch:
        if isinstance(node, ast.stmt):
            found.append(node)
        elif isinstance(node, ast.ExceptHandler | ast.match_case):
            found += node.body
    return found


def _last_word(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement itself binds or deletes, without those in its branches."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            for alias in aliases:
                yield alias.asname or alias.name.partition(".")[0]
        case ast.Expr(value=ast.Constant()):  # a text
            return
        case _:
            yield from _stored_names(statement)


def _stored_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement's own parts bind, as targets do, and `:=`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.Lambda):
            continue
        if isinstance(child, ast.Name):
            if not isinstance(child.ctx, ast.Load):
                yield child.id
            continue
        if isinstance(child, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and child.name:
            yield child.name
        if not isinstance(child, ast.Constant | ast.expr_context):
            yield from _stored_names(child)
