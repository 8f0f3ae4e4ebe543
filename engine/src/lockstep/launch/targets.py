"""Finds mistakes in `_target_` nodes before ranks start, without importing what they name.

A node names a class or a function, and its other keys are the arguments. The text of a module shows
whether the name exists, which arguments there are, which must be given, and often of which kind
they are. What only an import can tell is left to the ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib import metadata
from typing import Any

from lockstep.errors import UserError
from lockstep.launch.module_texts import (
    hides_submodule,
    names_in,
    submodule,
    submodules,
    top_module,
)
from lockstep.launch.signatures import Signature, Values, signature_of
from lockstep.optional import refuse_absent
from lockstep.settings import as_typed

# Lightning's logger -> its library, an optional dependency of the same name.
TRACKERS = {"MLFlowLogger": "mlflow", "TensorBoardLogger": "tensorboard"}
HYDRAS = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
UNSET = "???"  # what OmegaConf calls missing
MOST_LISTED = 8  # arguments in an error
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

# Lightning's callbacks that would silently change the experiment: why not, and what instead.
CALLBACKS = "lightning.pytorch.callbacks."
REFUSED = {
    "BatchSizeFinder": "would change the batch; set a batch size that fits",
    "GradientAccumulationScheduler": "would change the batch; set batch sizes instead",
    "LearningRateFinder": "would train outside the schedule; sweep the rate with --multirun",
    "ModelPruning": "renames weights, so no checkpoint fits; prune the trained model instead",
    "StochasticWeightAveraging": "replaces the schedule; use EMAWeightAveraging",
}


def refuse_mistakes(
    values: Mapping[str, Any],
    given: Mapping[str, Collection[str]] | None = None,
    set_by: Callable[[str], str | None] = lambda _name: None,
) -> None:
    """Raise a `UserError` for the first mistake in any `_target_` node of a configuration.

    Args:
        values: the configuration as plain dictionaries, lists, and values.
        given: a node's dotted name, in which `*` stands for any part of it -> arguments that code
            adds to it, so that none of them lacks; `("*",)`: code may add any.
        set_by: returns what else than a node's own file has set an argument; None: nothing.
    """
    nodes = [*_nodes(values, "")]
    for path, node, _ in nodes:
        mistake = mistake_in(node["_target_"])
        if mistake:
            raise UserError(f"{_join(path, '_target_')}={node['_target_']}: {mistake}")
    for path, node, is_for_code in nodes:
        target = node["_target_"]
        _refuse_other_experiment(path, target)
        _refuse_absent_tracker(target)
        added = _added(path, given or {})
        may_lack = not is_for_code and "*" not in added
        signature = signature_of(target) if may_lack or _arguments(node) else None
        if signature is None:
            continue
        called = target.rpartition(".")[2]
        _refuse_unknown(path, node, called, signature, set_by)
        if may_lack:
            _refuse_lacking(path, node, called, signature, added)
        _refuse_other_kinds(path, node, signature)


def _added(path: str, given: Mapping[str, Collection[str]]) -> set[str]:
    """Return the arguments that code adds to a node."""
    matching = (names for pattern, names in given.items() if fnmatchcase(path, pattern))
    return {name for names in matching for name in names}


def _refuse_other_experiment(path: str, target: str) -> None:
    """Raise a `UserError` for a callback of Lightning's that would change the experiment."""
    name = target.removeprefix(CALLBACKS)
    if name != target and name in REFUSED:
        raise UserError(f"{path}: Lightning's {name} {REFUSED[name]}")


def _refuse_absent_tracker(target: str) -> None:
    """Raise a `UserError` if the library of a tracker is not installed."""
    library = TRACKERS.get(target.removeprefix("lightning.pytorch.loggers."))
    if library is not None:
        refuse_absent(f"logger={library}", library, library)


def _nodes(
    value: Any, path: str, *, is_for_code: bool = False
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield each `_target_` node in a value: its dotted name, itself, and whether code builds it.

    Code builds the nodes in one with `_recursive_: false`, and may add arguments.
    """
    if isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from _nodes(child, _join(path, index), is_for_code=is_for_code)
    if not isinstance(value, Mapping):
        return
    target = value.get("_target_")
    if isinstance(target, str) and not _is_reference(target):
        yield path, value, is_for_code
    inner = is_for_code or value.get("_recursive_", True) is not True
    for key, child in value.items():
        yield from _nodes(child, _join(path, key), is_for_code=inner)


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _is_reference(value: Any) -> bool:
    """Return whether a value is known only later: from another setting, or the environment."""
    return isinstance(value, str) and ("${" in value or value == UNSET)


def _arguments(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's arguments that have names."""
    return {str(name): value for name, value in node.items() if name not in HYDRAS}


def _refuse_unknown(
    path: str,
    node: Mapping[str, Any],
    called: str,
    signature: Signature,
    set_by: Callable[[str], str | None],
) -> None:
    """Raise a `UserError` for an argument that the signature lacks."""
    if signature.takes_any_name:
        return
    known = [*signature.named]
    for name, value in _arguments(node).items():
        if name not in known:
            setting = _join(path, name)
            place = set_by(setting)
            by, remedy = ("", "")
            if place is not None:
                by, remedy = f" (of {place})", f" ~{setting} would leave it out"
            raise UserError(
                f"{setting}{_shown(value)}{by}: {called} has no argument {name}"
                f"{_nearest_argument(name, known)}{remedy}"
            )


def _nearest_argument(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    if not known:
        return "; it takes none, so leave it out"
    return (
        f"; use {_either(known)}" if len(known) <= MOST_LISTED else "; correct it, or leave it out"
    )


def _shown(value: Any) -> str:
    """Return a plain value as an error shows it; a list or a node would not fit in a line."""
    return "" if isinstance(value, Mapping | list | tuple) else f"={as_typed(value)}"


def _refuse_lacking(
    path: str,
    node: Mapping[str, Any],
    called: str,
    signature: Signature,
    added: Collection[str],
) -> None:
    """Raise a `UserError` for required arguments that neither the node nor code gives."""
    by_place = node.get("_args_", [])
    if node.get("_partial_", False) is not False or not isinstance(by_place, list | tuple):
        return  # the rest comes later, or from a reference
    set_here = {name for name, value in _arguments(node).items() if value != UNSET}
    filled = {parameter.name for parameter in signature.positional[: len(by_place)]}
    lacking = [
        parameter.name
        for parameter in signature.parameters
        if parameter.is_required and parameter.name not in {*set_here, *filled, *added}
    ]
    if lacking:
        settings = " and ".join(_join(path, name) for name in lacking)
        where = path or "the configuration"
        raise UserError(f"{where}: {called} needs {' and '.join(lacking)}; set {settings}")


def _refuse_other_kinds(path: str, node: Mapping[str, Any], signature: Signature) -> None:
    """Raise a `UserError` for a value whose kind the signature doesn't have."""
    for name, value in _arguments(node).items():
        parameter = signature.named.get(name)
        if parameter is None or parameter.values is None or _fits(value, parameter.values):
            continue
        raise UserError(f"{_join(path, name)}={_quoted(value)} {_rule(value, parameter.values)}")


def _fits(value: Any, values: Values) -> bool:
    """Return whether a plain value is one that the signature names, or may work all the same.

    Much code that says `str` or `int` takes null or false for "none".
    """
    kinds = values.kinds
    if any(type(value) is type(choice) and value == choice for choice in values.choices):
        return True
    if value is None or _is_reference(value):
        return True
    if isinstance(value, bool):
        return bool(kinds) and (value is False or kinds != {str})
    if isinstance(value, int):
        return bool(kinds & {int, float}) or (bool in kinds and value in (0, 1))
    if isinstance(value, float):
        return float in kinds or (int in kinds and value.is_integer())
    return str in kinds if isinstance(value, str) else True


def _quoted(value: Any) -> str:
    """Return a value as an error shows it: a text that looks like a number in quotes."""
    try:
        float(value)
    except (TypeError, ValueError):
        return as_typed(value)
    return f'"{value}"' if isinstance(value, str) else as_typed(value)


def _rule(value: Any, values: Values) -> str:
    """Return what a value must be."""
    choices = [as_typed(choice) for choice in values.choices]
    if not values.kinds:
        near = get_close_matches(value, choices, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"is not one of {', '.join(choices)}{hint}"
    shown = values.kinds - {int} if float in values.kinds else values.kinds
    rule = f"must be {_either([*choices, *(KINDS[kind] for kind in KINDS if kind in shown)])}"
    return f'{rule}; write "{as_typed(value)}" in quotes' if shown == {str} else rule


def _either(names: list[str]) -> str:
    """Return names as an error lists them: `a, b, or c`."""
    if len(names) < 3:
        return " or ".join(names)
    return f"{', '.join(names[:-1])}, or {names[-1]}"


def mistake_in(target: str) -> str | None:
    """Return which part of a dotted name is missing; None if none is, or if only imports tell."""
    words = target.split(".")
    if not all(word.isidentifier() for word in words):
        return None  # Hydra says what is wrong with it
    if words[0] == "__main__":
        return None  # of a notebook
    top = words[0]
    module = top_module(top)
    if module is None:
        installed = metadata.packages_distributions()
        return f"there is no module {top}{_suggestion(top, installed)}"
    may_be_other = False  # whether what imports find is not this module, but something of its name
    for word in words[1:]:
        try:
            child = submodule(module, word)
        except KeyError:  # of a namespace package inside of one that isn't imported
            return None
        if child is None:
            names = names_in(module)
            if names is None or word in names or may_be_other:
                return None
            siblings = [*names, *submodules(module)]
            return f"{module.name} has no {word}{_suggestion(word, siblings)}"
        may_be_other = hides_submodule(module, word)
        module = child
    return None


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"; did you mean {near[0]}?" if near else "; correct it"
