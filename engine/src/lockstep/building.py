"""Builds what `_target_` nodes of a configuration name."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_origin

from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep.errors import UserError, describe_error
from lockstep.patches.omegaconf import place_of, root_of
from lockstep.settings import as_typed

LIBRARIES = ("lightning.", "torch.", "torchmetrics.")  # whose own words name a wrong argument
# Names: this module needs neither Lightning nor torch.
WRONG_ARGUMENT = ("MisconfigurationException", "TypeError", "ValueError")
# An argument that programs give -> the setting that decides it, if it has another name.
DECIDED_BY = {
    "accumulate_grad_batches": "batch.micro_size",
    "default_root_dir": "run_dir",
    "log_every_n_steps": "log_every",
}
TARGETS = re.compile(r'"(?:_target_|path)": "(.+?)"')


def build(node: Any, **given: Any) -> Any:
    """Build what a `_target_` node names, with those of the given arguments that it accepts.

    So a program can offer what it knows, such as `seed`, and each class takes what it needs:

        data = build(cfg.data, batch=batch, seed=cfg.seed)

    A list that both have, such as a Trainer's `plugins`, is joined.

        >>> lockstep.build({"_target_": "torch.nn.Linear", "in_features": 2}, out_features=3)
        Linear(in_features=2, out_features=3, bias=True)

    Args:
        node: of a configuration: the name of a class or a function, and arguments for it.
        given: more arguments, by name.

    Raises:
        UserError: there is no such class, it has no such argument, the node has an argument that is
            given, or the class refuses one.
    """
    if not isinstance(node, Mapping | DictConfig):
        raise UserError(f"{as_typed(node)} is no node that names its class by _target_; write one")
    config = node if isinstance(node, DictConfig) else OmegaConf.create({**node})
    place = place_of(config)
    values = _resolved(config)
    target = values.get("_target_")
    if not isinstance(target, str):
        raise UserError(f"{place or 'a node'} has no _target_, which names its class; set it")
    function = imported(target, place)
    accepted = inspect.signature(function).parameters
    takes_any = any(item.kind is item.VAR_KEYWORD for item in accepted.values())
    named = _named_by(function)
    arguments = {name: value for name, value in given.items() if name in named}
    if not takes_any:
        _refuse_unknown(place, values, accepted)
    _refuse_unknown_inside(place, values)
    _refuse_lacking_inside(place, values)
    own = dict(partial_of(values, place).keywords)
    _refuse_no_function(place, own, accepted)
    for name in own.keys() & arguments.keys():
        setting = f"{place}.{name}".lstrip(".")
        remedy = _remedy(config, name)
        arguments[name] = _joined(setting, own.pop(name), arguments[name], remedy)
    _refuse_lacking(place, target, accepted, {**own, **arguments})
    try:
        return function(**own, **arguments)
    except UserError as mistake:
        raise _of_node(place, mistake, accepted) from mistake
    except Exception as error:
        is_of_library = str(getattr(function, "__module__", "")).startswith(LIBRARIES)
        if not (is_of_library and type(error).__name__ in WRONG_ARGUMENT):
            raise  # a traceback of the owner's code tells more
        raise UserError(f"{place}: {' '.join(str(error).split())}".lstrip(": ")) from error


def _named_by(function: Callable[..., Any]) -> set[str]:
    """Return the arguments that a function names, or a class, also those of its base classes.

    A class with `**kwargs` passes them on to the next one: Lightning's Trainer takes its arguments
    through a class derived from it. `DDPStrategy(**kwargs)` passes them to torch, which has none.
    """
    constructors: list[Any] = [function]
    if inspect.isclass(function):
        constructors = [
            item["__init__"] for item in map(vars, function.__mro__) if "__init__" in item
        ]
    named: set[str] = set()
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters
        named |= parameters.keys()
        if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
            break
    return named


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return a node's values, or raise a `UserError` if one is missing, or refers to nothing."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}; set it") from None
    return cast(dict[str, Any], values)


def instantiate_all(nodes: Mapping[str, Any] | None, **given: Any) -> list[Any]:
    """Build each node of a group, such as `callbacks`, in its order; leave out those that are null.

        >>> lockstep.instantiate_all({"layer": {"_target_": "torch.nn.Identity"}, "none": None})
        [Identity()]

    Args:
        nodes: a name you choose -> a `_target_` node.
        given: as in `build`.

    Raises:
        UserError: as in `build`.
    """
    return [build(node, **given) for node in (nodes or {}).values() if node is not None]


def imported(target: str, place: str = "") -> Any:
    """Return what a dotted name stands for, or raise a `UserError`.

    Args:
        target: the name of a class or a function.
        place: of the node that has it.
    """
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # it logs what it raises
    if not {"", str(Path.cwd())} & {*sys.path}:  # as `python -m` does, but a script doesn't
        sys.path.append(str(Path.cwd()))
    try:
        return get_method(target)
    except (InstantiationException, TypeError, ImportError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # Hydra's errors around it repeat the name
            cause = cause.__cause__
        name = f"{place}._target_".lstrip(".")
        line = describe_error(cause)
        raise UserError(f"{name}={target} can't be imported; correct it ({line})") from error


def partial_of(node: Mapping[str, Any], place: str = "") -> Any:
    """Return the function that a node names, with the node's own arguments; nobody calls it yet.

    Args:
        node: of a configuration, resolved.
        place: of the node, for errors.

    Raises:
        UserError: there is no such function, or a node in it can't be built.
    """
    # It may build what the configuration names. Hydra still rejects what runs arbitrary code.
    allowed: dict[str, Any] = {}
    if "_execution_whitelist_" in inspect.signature(instantiate).parameters:
        allowed["_execution_whitelist_"] = _names_of_targets(node)
    try:
        return instantiate({**node, "_partial_": True}, _convert_="all", **allowed)
    except InstantiationException as error:
        raise _mistake(place, error) from error
    except UserError as mistake:  # of an inner node: Hydra 1.4 adds its place as a note
        raise _of_node(_inner_place(place, *getattr(mistake, "__notes__", ())), mistake) from None


def _names_of_targets(node: Mapping[str, Any]) -> list[str]:
    """Return the names of all targets in a node, and where those are defined: Hydra checks both."""
    names = TARGETS.findall(json.dumps(node, default=str))
    for name in [*names]:
        with contextlib.suppress(UserError):  # which Hydra tells
            target = imported(name)
            names.append(f"{target.__module__}.{getattr(target, '__qualname__', '')}")
    return names


def _mistake(place: str, error: InstantiationException) -> Exception:
    """Return what is wrong with a node in one line; Hydra's own errors have it as their cause."""
    cause = error.__cause__
    if isinstance(cause, UserError):
        return _of_node(_inner_place(place, str(error)), cause)
    if cause is not None and not isinstance(cause, TypeError | ImportError):
        return error  # a traceback of the owner's code tells more
    return UserError(f"{place}: {' '.join(str(cause or error).split())}".lstrip(": "))


def _inner_place(place: str, *texts: str) -> str:
    """Return the place of a node in the one at `place`, which Hydra's texts name at their end."""
    inner = "".join(texts).rpartition("full_key: ")[2].strip()
    return f"{place}.{inner}" if place and inner else place or inner


def _of_node(place: str, mistake: UserError, arguments: Collection[str] | None = None) -> UserError:
    """Return what a class says of its own argument by the setting's full name.

    Args:
        place: of the node.
        mistake: what the class has raised.
        arguments: of the class, since it may speak of another setting; None: unknown.
    """
    text = str(mistake)
    named = re.match(r"(\w+)=", text)
    if not place or not named or (arguments is not None and named[1] not in arguments):
        return mistake
    return UserError(f"{place}.{text}")


def _refuse_unknown(place: str, values: dict[str, Any], accepted: Mapping[str, Any]) -> None:
    called = values["_target_"].rpartition(".")[2]
    for name in values:
        if name in accepted or name.startswith("_"):  # such as `_target_`
            continue
        near = get_close_matches(name, accepted, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; leave it out"
        raise UserError(f"{place}.{name}: {called} has no argument {name}{hint}".lstrip("."))


def _refuse_lacking(
    place: str, target: str, accepted: Mapping[str, inspect.Parameter], given: Collection[str]
) -> None:
    """Raise a `UserError` for required arguments that nobody gives."""
    lacking = _lacking(accepted, given)
    if lacking:
        settings = " and ".join(f"{place}.{name}".lstrip(".") for name in lacking)
        called = target.rpartition(".")[2]
        raise UserError(
            f"{place or 'a node'}: {called} needs {' and '.join(lacking)}; set {settings}"
        )


def _lacking(accepted: Mapping[str, inspect.Parameter], given: Collection[str]) -> list[str]:
    """Return the required arguments that nobody gives."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, item in accepted.items()
        if item.default is item.empty and item.kind not in variable and name not in given
    ]


def _refuse_unknown_inside(place: str, node: Any) -> None:
    """Do the same for the nodes inside, which may be called later, in another's code."""
    children: Any = ()
    if isinstance(node, dict):
        children = node.items()
    elif isinstance(node, list):
        children = enumerate(node)
    for name, child in children:
        inner = f"{place}.{name}".lstrip(".")
        if isinstance(child, dict) and isinstance(child.get("_target_"), str):
            accepted = inspect.signature(imported(child["_target_"], inner)).parameters
            takes_any = any(item.kind is item.VAR_KEYWORD for item in accepted.values())
            if not takes_any:
                _refuse_unknown(inner, child, accepted)
        _refuse_unknown_inside(inner, child)


def _refuse_lacking_inside(place: str, node: dict[str, Any]) -> None:
    """Do the same for the nodes inside that are built now."""
    if node.get("_recursive_", True) is not True:  # code builds what is inside, and may add some
        return
    for name, child in node.items():
        if not isinstance(child, dict):
            continue
        inner = f"{place}.{name}".lstrip(".")
        target = child.get("_target_")
        if isinstance(target, str) and not child.get("_partial_") and "_args_" not in child:
            lacking = _lacking(inspect.signature(imported(target, inner)).parameters, child)
            if lacking:
                raise UserError(
                    f"{inner}: {target.rpartition('.')[2]} needs {' and '.join(lacking)}; if code "
                    "gives that later, its YAML file needs _partial_: true"
                )
        _refuse_lacking_inside(inner, child)


def _refuse_no_function(
    place: str, own: Mapping[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> None:
    """Raise a `UserError` for another value in the place of a function, as annotations say."""
    for name, value in own.items():
        annotation = accepted[name].annotation if name in accepted else None
        if (get_origin(annotation) or annotation) is Callable and not callable(value):
            setting = f"{place}.{name}".lstrip(".")
            raise UserError(
                f"{setting} must be a function; its YAML file needs _target_, which names it, and "
                "_partial_: true"
            )


def _remedy(config: DictConfig, name: str) -> str:
    """Return what to do with an argument that the program gives from another setting."""
    setting = DECIDED_BY.get(name, name)
    root = root_of(config)
    is_there = root is not config and OmegaConf.select(root, setting.partition(".")[0]) is not None
    return f"set {setting} instead" if is_there else "leave it out"


def _joined(setting: str, own: Any, given: Any, remedy: str) -> Any:
    """Return what a node and the program both have: lists together; else raise a `UserError`."""
    if isinstance(own, list) and isinstance(given, list):
        return [*given, *own]
    if own is None or given is None:
        return own if given is None else given
    value = f"={as_typed(given)}" if isinstance(given, bool | int | float | str) else ""
    name = setting.rpartition(".")[2]
    raise UserError(f"{setting}={as_typed(own)}: the program gives {name}{value}; {remedy}")
