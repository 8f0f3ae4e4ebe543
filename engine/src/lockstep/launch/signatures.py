"""The arguments of what a `_target_` names, read from its text without importing it.

What only an import can tell has no signature here: a class with a decorator or a metaclass that may
change how it is called, a module in C, a name with two meanings. No owner's valid `_target_` may be
refused because of something that its text doesn't show.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any

from lockstep.launch.module_texts import (
    Binding,
    Bindings,
    bindings_in,
    find_module,
    hides_submodule,
    submodule,
    text_of,
    top_module,
)

MOST_BASES = 60  # of a class, with those of its bases
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Decorators after which a function takes the same arguments.
KEEPING = {
    "abc.abstractmethod",
    "contextlib.contextmanager",
    "functools.cache",
    "functools.lru_cache",
    "torch.inference_mode",
    "torch.no_grad",
    "typing.final",
    "typing.override",
    "typing_extensions.final",
    "typing_extensions.override",
    # Of Lightning's Trainer: environment variables can also set an argument.
    "lightning.pytorch.utilities.argparse._defaults_from_env_vars",
    "pytorch_lightning.utilities.argparse._defaults_from_env_vars",
}
KEEPING_CLASS = {
    "lockstep.settings.not_a_config",
    "typing.final",
    "typing.runtime_checkable",
    "typing_extensions.final",
}
DATACLASS = "dataclasses.dataclass"
SETTING = "lockstep.settings.setting"  # which returns a field
NAMED_TUPLE = "typing.NamedTuple"
PROTOCOL = "typing.Protocol"
# Classes that take whatever the `__init__` of a class derived from them takes.
ABOVE_ALL = (
    "abc.ABC",
    "builtins.object",
    "typing.Generic",
    *(f"typing.{name}" for name in ("Hashable", "Iterable", "Iterator", "Mapping", "Sequence")),
)
OTHER_BASES = ("builtins.Exception", "builtins.dict", "builtins.list", NAMED_TUPLE, PROTOCOL)
# Long texts of usual bases, which need no reading if a class has its own `__init__`.
USUAL_BASES = {
    "torch.nn.Module": "torch.nn.modules.module.Module",
    "torch.nn.modules.module.Module": "torch.nn.modules.module.Module",
    **{
        f"{package}.{name}": f"{package}.{place}.{name}"
        for package in ("lightning.pytorch", "pytorch_lightning")
        for name, place in {
            "LightningModule": "core.module",
            "LightningDataModule": "core.datamodule",
        }.items()
    },
    "lightning.LightningModule": "lightning.pytorch.core.module.LightningModule",
    "lightning.LightningDataModule": "lightning.pytorch.core.datamodule.LightningDataModule",
}
PLAIN_KINDS: dict[str, type] = {
    "builtins.bool": bool,
    "builtins.float": float,
    "builtins.int": int,
    "builtins.str": str,
}


@dataclass(frozen=True)
class Values:
    """Which plain values an argument may have; None always may stand for an absent one."""

    kinds: frozenset[type] = frozenset()  # of bool, float, int, str
    choices: tuple[Any, ...] = ()  # values beside those of the kinds


@dataclass(frozen=True)
class Parameter:
    """An argument of a class or a function."""

    name: str
    kind: Any  # as in `inspect.Parameter`
    is_required: bool
    values: Values | None  # None: any


@dataclass(frozen=True)
class Signature:
    """The arguments of a class or a function, in their order."""

    parameters: tuple[Parameter, ...]

    @property
    def positional(self) -> list[Parameter]:
        """Those that may be given by their place."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [parameter for parameter in self.parameters if parameter.kind in kinds]

    @property
    def named(self) -> dict[str, Parameter]:
        """Those that may be given by their name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {item.name: item for item in self.parameters if item.kind in kinds}

    @property
    def takes_any_name(self) -> bool:
        """Whether other names are accepted, as `**arguments`."""
        return any(item.kind is inspect.Parameter.VAR_KEYWORD for item in self.parameters)

    def without_first(self) -> "Signature | None":
        """Return the signature of a method with its `self`; None if it has none of its own."""
        if self.parameters[:1] != tuple(self.positional[:1]) or not self.parameters:
            return None
        return Signature(self.parameters[1:])


class UnknownError(Exception):
    """The text doesn't show it."""


@dataclass(frozen=True, eq=False)
class Class:
    """A class that a module's text defines."""

    module: ModuleSpec
    node: ast.ClassDef
    bindings: Bindings  # of its body


@dataclass(frozen=True, eq=False)
class Callable:
    """A function of a module, or a method, which belongs to a class."""

    module: ModuleSpec
    node: Function
    owner: Class | None = None


Found = ModuleSpec | Class | Callable | str  # a name as `builtins.int` has no text


def signature_of(target: str) -> Signature | None:
    """Return the arguments of what a dotted name names; None if only an import can tell."""
    words = target.split(".")
    if not all(word.isidentifier() for word in words) or words[0] == "__main__":
        return None
    try:
        found = _find(words)
        if isinstance(found, Class):
            return _of_class(found)
        return _of_function(found) if isinstance(found, Callable) else None
    # The last two: modules that import each other, and files that import systems can't find.
    except (UnknownError, RecursionError, ValueError, KeyError, ImportError):
        return None


def _find(words: list[str]) -> Found:
    module = top_module(words[0])
    if module is None:
        raise UnknownError
    found: Found = module
    for word in words[1:]:
        found = _member(found, word)
    return found


def _member(of: Found, name: str) -> Found:
    """Return what a name stands for in a module or a class."""
    if isinstance(of, ModuleSpec):
        return _in_module(of, name)
    if not isinstance(of, Class):
        raise UnknownError
    for base in _mro(of):
        if isinstance(base, str):
            if base in ABOVE_ALL:
                continue
            raise UnknownError
        if name in base.bindings:
            return _meaning(_only(base.bindings[name]), name, base.module, base)
    raise UnknownError


def _in_module(module: ModuleSpec, name: str) -> Found:
    """Return what a name stands for in a module: what its text binds, else a submodule."""
    inside = submodule(module, name)
    if inside is not None and not hides_submodule(module, name):
        return inside
    text = text_of(module)
    if text is None:
        raise UnknownError
    if name in text.bindings:
        binding = _only(text.bindings[name])
        if text.is_changed and not binding.only_for_types:
            raise UnknownError
        later = [star for star in text.stars if star.lineno > binding.statement.lineno]
        if _is_global_elsewhere(name, text.code) or _bringing(module, later, name):
            raise UnknownError
        found = _meaning(binding, name, module)
        is_same = isinstance(found, ModuleSpec) and inside and found.name == inside.name
        if inside is not None and not is_same:  # which it is depends on the order of imports
            raise UnknownError
        return found
    if inside is not None:
        return inside
    return _from_stars(module, text.stars, name)


def _is_global_elsewhere(name: str, code: bytes) -> bool:
    """Return whether a function of the module may bind the name again."""
    lines = (line.split() for line in code.splitlines() if b"global " in line)
    return any(
        words[:1] == [b"global"] and name.encode() in b" ".join(words).replace(b",", b" ").split()
        for words in lines
    )


def _from_stars(module: ModuleSpec, stars: Iterable[ast.ImportFrom], name: str) -> Found:
    """Return what a name stands for that one of several `from x import *` brings."""
    sources = _bringing(module, stars, name)
    if len(sources) != 1:
        raise UnknownError
    return _in_module(sources[0], name)


def _bringing(module: ModuleSpec, stars: Iterable[ast.ImportFrom], name: str) -> list[ModuleSpec]:
    """Return the modules from which some `from x import *` bring a name."""
    bringing = []
    for source in (_imported(module, star) for star in stars):
        text = text_of(source)
        if text is None or (text.exported is None and (text.stars or "__all__" in text.bindings)):
            raise UnknownError
        public = {bound for bound in text.bindings if not bound.startswith("_")}
        if name in (public if text.exported is None else text.exported):
            bringing.append(source)
    return bringing


def _imported(module: ModuleSpec, statement: ast.ImportFrom) -> ModuleSpec:
    """Return the module from which a statement imports."""
    found = find_module(_origin(module, statement))
    if found is None:
        raise UnknownError
    return found


def _origin(module: ModuleSpec, statement: ast.ImportFrom) -> str:
    """Return the full name of the module from which a statement imports."""
    if not statement.level:
        return statement.module or ""
    is_package = module.submodule_search_locations is not None
    words = module.name.split(".")
    up = statement.level - 1 if is_package else statement.level
    if up >= len(words):
        raise UnknownError
    return ".".join([*words[: len(words) - up], *filter(None, [statement.module])])


def _only(bindings: list[Binding]) -> Binding:
    """Return the statement that decides what a name stands for, or raise `UnknownError`."""
    at_run_time = [binding for binding in bindings if not binding.only_for_types]
    deciding = at_run_time or bindings  # a package that imports when asked shows types only
    earlier = [binding.statement for binding in deciding[:-1]]
    if not all(isinstance(node, Function) and _is_overload(node) for node in earlier):
        raise UnknownError
    return deciding[-1]


def _is_overload(function: Function) -> bool:
    match function.decorator_list:
        case [ast.Name(id="overload") | ast.Attribute(attr="overload")]:
            return True
    return False


def _meaning(binding: Binding, name: str, module: ModuleSpec, owner: Class | None = None) -> Found:
    """Return what a statement makes a name stand for."""
    match binding.statement:
        case ast.ClassDef() as node:
            return Class(module, node, bindings_in(node.body))
        case ast.FunctionDef() | ast.AsyncFunctionDef() as node:
            return Callable(module, node, owner)
        case ast.ImportFrom() as statement:
            source, original = _imported(module, statement), _original(statement, name)
            if (source.name, original) == (module.name, name):  # `from . import name`
                raise UnknownError
            return _member(source, original)
        case ast.Import() as statement:
            found = find_module(_original(statement, name))
            if found is not None:
                return found
        case ast.Assign(targets=[ast.Name()], value=ast.Name() | ast.Attribute() as value):
            if owner is None:
                return _named(value, module)
    raise UnknownError


def _original(statement: ast.Import | ast.ImportFrom, name: str) -> str:
    """Return under which name an `import` finds what it binds to `name`."""
    for alias in statement.names:
        if alias.asname == name:
            return alias.name
        if alias.asname is None and isinstance(statement, ast.ImportFrom) and alias.name == name:
            return name
        if alias.asname is None and alias.name.partition(".")[0] == name:
            return name  # `import a.b` binds a
    raise UnknownError


def _named(node: ast.expr, module: ModuleSpec) -> Found:
    """Return what an expression stands for in a module."""
    if isinstance(node, ast.Attribute):
        return _member(_named(node.value, module), node.attr)
    if not isinstance(node, ast.Name):
        raise UnknownError
    return _in_module(module, node.id)


def _full_name(node: ast.expr, module: ModuleSpec) -> str | None:
    """Return the name under which an expression is imported, as `typing.Optional`."""
    if isinstance(node, ast.Attribute):
        before = _full_name(node.value, module)
        return None if before is None else f"{before}.{node.attr}"
    text = text_of(module)
    if not isinstance(node, ast.Name) or text is None:
        return None
    if node.id not in text.bindings:
        return None if text.stars else f"builtins.{node.id}"
    statement = _only(text.bindings[node.id]).statement
    if isinstance(statement, ast.ImportFrom):
        return f"{_origin(module, statement)}.{_original(statement, node.id)}"
    if isinstance(statement, ast.Import):
        return _original(statement, node.id)
    return f"{module.name}.{node.id}" if isinstance(statement, Function) else None


def _of_function(function: Callable) -> Signature | None:
    """Return what a function takes; of a class method without its class."""
    method = ""
    for decorator in function.node.decorator_list:
        name = _decorator(decorator, function.module)
        if function.owner is not None and name in ("builtins.classmethod", "builtins.staticmethod"):
            method = name
        elif name not in KEEPING:
            return None
    signature = _read_arguments(function.node, function.module)
    return signature.without_first() if method == "builtins.classmethod" else signature


def _decorator(node: ast.expr, module: ModuleSpec) -> str | None:
    return _full_name(node.func if isinstance(node, ast.Call) else node, module)


def _read_arguments(function: Function, module: ModuleSpec) -> Signature:
    """Return a function's arguments as its text lists them."""
    kinds = inspect.Parameter
    listed = function.args
    by_place = [*listed.posonlyargs, *listed.args]
    defaults: list[ast.expr | None] = [None] * (len(by_place) - len(listed.defaults))
    found: list[tuple[ast.arg, Any, ast.expr | None]] = []
    for index, (argument, default) in enumerate(
        zip(by_place, [*defaults, *listed.defaults], strict=True)
    ):
        is_by_place = index < len(listed.posonlyargs)
        kind = kinds.POSITIONAL_ONLY if is_by_place else kinds.POSITIONAL_OR_KEYWORD
        found.append((argument, kind, default))
    if listed.vararg:
        found.append((listed.vararg, kinds.VAR_POSITIONAL, None))
    for argument, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True):
        found.append((argument, kinds.KEYWORD_ONLY, default))
    if listed.kwarg:
        found.append((listed.kwarg, kinds.VAR_KEYWORD, None))
    return Signature(
        tuple(
            _parameter(argument.arg, kind, argument.annotation, default, module)
            for argument, kind, default in found
        )
    )


def _parameter(
    name: str, kind: Any, annotation: ast.expr | None, default: ast.expr | None, module: ModuleSpec
) -> Parameter:
    is_open = kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    is_required = default is None and not is_open
    return Parameter(name, kind, is_required, _values(annotation, default, module))


def _of_class(found: Class) -> Signature | None:
    """Return what a class takes: what the first `__init__` of it and its bases does."""
    mro = _mro(found)
    for kind in mro:
        if isinstance(kind, str):
            if kind in ABOVE_ALL:
                continue
            return signature_of(kind) if kind in USUAL_BASES.values() else None
        if "__init__" in kind.bindings:
            if NAMED_TUPLE in mro:
                raise UnknownError  # what makes the tuple takes the arguments, too
            constructor = _only(kind.bindings["__init__"]).statement
            if not isinstance(constructor, Function):
                raise UnknownError
            whole = _of_function(Callable(kind.module, constructor))
            return None if whole is None else whole.without_first()
        if _is_named_tuple(kind):
            return Signature(tuple(_own_fields(kind, is_keyword=False)))
        options = _dataclass_options(kind)
        if options is not None and options.get("init", True):
            return _of_dataclass(mro[mro.index(kind) :])
    return Signature(())


def _mro(found: Class) -> list[Class | str]:
    """Return a class and its bases in the order in which Python looks for a method.

    Raises:
        UnknownError: one of them is not in any text, or may change how a class is called.
    """
    _refuse_dynamic(found)
    orders: list[list[Class | str]] = []
    bases: list[Class | str] = []
    for node in found.node.bases:
        base = _base(node, found.module)
        bases.append(base)
        orders.append([base] if isinstance(base, str) else _mro(base))
    merged: list[Class | str] = [found]
    orders.append(bases)
    while any(orders):
        orders = [order for order in orders if order]
        tails = {_key(item) for order in orders for item in order[1:]}
        heads = [order[0] for order in orders if _key(order[0]) not in tails]
        if not heads or len(merged) > MOST_BASES:
            raise UnknownError
        merged.append(heads[0])
        orders = [[item for item in order if _key(item) != _key(heads[0])] for order in orders]
    return merged


def _key(kind: Class | str) -> Any:
    """Return what is equal for the same class: a text is parsed once."""
    return kind if isinstance(kind, str) else id(kind.node)


def _base(node: ast.expr, module: ModuleSpec) -> Class | str:
    """Return a class that another one has as its base."""
    if isinstance(node, ast.Subscript):  # Generic[T]
        node = node.value
    name = _full_name(node, module) or ""
    if name.startswith("collections.abc.") and not name.endswith("View"):
        return ABOVE_ALL[0]
    if name in (*ABOVE_ALL, *OTHER_BASES):
        return name
    if name in USUAL_BASES:
        return USUAL_BASES[name]
    if name.startswith("typing."):
        raise UnknownError
    found = _named(node, module)
    if not isinstance(found, Class):
        raise UnknownError
    return found


def _refuse_dynamic(found: Class) -> None:
    """Raise `UnknownError` for a class that may be called in another way than its `__init__`."""
    for keyword in found.node.keywords:
        if keyword.arg != "metaclass" or _full_name(keyword.value, found.module) != "abc.ABCMeta":
            raise UnknownError
    if {"__new__", "__init_subclass__", "__signature__"} & found.bindings.keys():
        raise UnknownError
    for decorator in found.node.decorator_list:
        if _decorator(decorator, found.module) not in (DATACLASS, *KEEPING_CLASS):
            raise UnknownError


def _is_named_tuple(found: Class) -> bool:
    return any(_full_name(base, found.module) == NAMED_TUPLE for base in found.node.bases)


def _dataclass_options(found: Class) -> dict[str, Any] | None:
    """Return the arguments of a class's `@dataclass`; None if it has none."""
    for decorator in found.node.decorator_list:
        if _decorator(decorator, found.module) != DATACLASS:
            continue
        keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    return None


def _of_dataclass(mro: list[Class | str]) -> Signature:
    """Return what the `__init__` of a dataclass takes: also the fields of its bases."""
    fields: dict[str, Parameter | None] = {}
    for kind in reversed(mro):
        options = None if isinstance(kind, str) else _dataclass_options(kind)
        if options is None or isinstance(kind, str):
            continue
        # One that is overridden keeps its place.
        fields.update(_fields(kind, is_keyword=options.get("kw_only", False)))
    taken = [field for field in fields.values() if field is not None]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return Signature(
        (
            *(field for field in taken if field.kind is not keyword),
            *(field for field in taken if field.kind is keyword),
        )
    )


def _own_fields(found: Class, *, is_keyword: bool) -> Iterator[Parameter]:
    for _, field in _fields(found, is_keyword=is_keyword):
        if field is not None:
            yield field


def _fields(found: Class, *, is_keyword: bool) -> Iterator[tuple[str, Parameter | None]]:
    """Yield the name of each field of a class, and its argument; None if `__init__` has none."""
    plain = [statement for statement in found.node.body if isinstance(statement, ast.AnnAssign)]
    names = [item.target.id for item in plain if isinstance(item.target, ast.Name)]
    if any(len(found.bindings[name]) > 1 for name in names) or _has_fields_in_branches(found):
        raise UnknownError
    for statement in plain:
        if not isinstance(statement.target, ast.Name):
            continue
        name, annotation = statement.target.id, _as_expression(statement.annotation)
        outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
        kind = _full_name(outer, found.module)
        if kind == "typing.ClassVar":
            continue
        if kind == "dataclasses.KW_ONLY":
            is_keyword = True
            continue
        if kind == "dataclasses.InitVar" and isinstance(annotation, ast.Subscript):
            annotation = annotation.slice
        yield name, _field(name, annotation, statement.value, found.module, is_keyword)


def _has_fields_in_branches(found: Class) -> bool:
    """Return whether a class has a field in one of several branches."""
    return any(
        isinstance(binding.statement, ast.AnnAssign)
        and binding.statement not in found.node.body
        and not binding.only_for_types
        for bindings in found.bindings.values()
        for binding in bindings
    )


def _field(
    name: str,
    annotation: ast.expr,
    value: ast.expr | None,
    module: ModuleSpec,
    is_keyword: bool,
) -> Parameter | None:
    """Return a field's argument; None if `__init__` doesn't have it."""
    default = value
    if isinstance(value, ast.Call):
        options = {str(keyword.arg): keyword.value for keyword in value.keywords}
        if "None" in options:  # **options
            raise UnknownError
        maker = _full_name(value.func, module)
        if maker == SETTING:
            options |= dict(zip(("meaning", "default"), value.args, strict=False))
        elif maker != "dataclasses.field" or value.args:
            raise UnknownError  # it may return a field
        if not ast.literal_eval(options.get("init", ast.Constant(True))):
            return None
        is_keyword = ast.literal_eval(options.get("kw_only", ast.Constant(is_keyword)))
        default = options.get("default", options.get("default_factory"))
    by_place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    kind = inspect.Parameter.KEYWORD_ONLY if is_keyword else by_place
    return _parameter(name, kind, annotation, default, module)


def _as_expression(annotation: ast.expr) -> ast.expr:
    """Return an annotation, which may be written as a text."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return ast.parse(annotation.value.strip(), mode="eval").body
        except SyntaxError:
            return annotation
    return annotation


def _values(
    annotation: ast.expr | None, default: ast.expr | None, module: ModuleSpec
) -> Values | None:
    """Return which plain values an argument may have; None if other ones, too.

    A default is valid, whatever the annotation says.
    """
    try:
        values = None if annotation is None else _annotated(annotation, module)
    except UnknownError:  # a name in it has two meanings
        return None
    if values is None or values == Values():  # of `None` alone
        return None
    if default is None:
        return values
    try:
        value = ast.literal_eval(default)
    except (ValueError, TypeError):
        return None
    if value is None or value in values.choices or type(value) in values.kinds:
        return values
    if type(value) not in PLAIN_KINDS.values():
        return None
    if values.choices:
        return Values(values.kinds, (*values.choices, value))
    return Values(values.kinds | {type(value)}, values.choices)


def _annotated(annotation: ast.expr, module: ModuleSpec) -> Values | None:
    """Return the values of an annotation of plain kinds, unions, and literals."""
    node = _as_expression(annotation)
    if isinstance(node, ast.Constant) and node.value is None:
        return Values()
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _any_of([node.left, node.right], module)
    if not isinstance(node, ast.Subscript):
        kind = PLAIN_KINDS.get(_full_name(node, module) or "")
        return None if kind is None else Values(frozenset({kind}))
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match _full_name(node.value, module):
        case "typing.Optional" | "typing.Union":
            return _any_of(parts, module)
        case "typing.Literal" | "typing_extensions.Literal":
            if not all(isinstance(part, ast.Constant) for part in parts):
                return None
            choices = [part.value for part in parts if isinstance(part, ast.Constant)]
            return Values(choices=tuple(item for item in choices if item is not None))
    return None


def _any_of(parts: list[ast.expr], module: ModuleSpec) -> Values | None:
    """Return the values of a union; None if one of its parts isn't plain."""
    kinds: frozenset[type] = frozenset()
    choices: tuple[Any, ...] = ()
    for part in parts:
        values = _annotated(part, module)
        if values is None:
            return None
        kinds |= values.kinds
        choices += values.choices
    return Values(kinds, choices)
