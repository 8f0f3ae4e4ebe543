"""Builds objects that the configuration names with `_target_`."""

import inspect
import json
import re
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_method, instantiate

from lockstep_gpt.errors import UserError


def build(node: dict[str, Any], known: dict[str, Any]) -> Any:
    """Build a `_target_` node with what it accepts of `known`, or raise a `UserError`."""
    try:
        target = get_method(node["_target_"])
        told = {name: known[name] for name in inspect.signature(target).parameters if name in known}
        return deferred(node)(**told)
    except (InstantiationException, TypeError, ImportError) as error:
        raise mistake(error) from error


def deferred(node: dict[str, Any]) -> Any:
    """Return a partial of a `_target_` node; Hydra would make configurations of its arguments."""
    # It may build what the configuration names. Hydra still rejects what runs arbitrary code.
    targets = re.findall(r'"(?:_target_|path)": "(.+?)"', json.dumps(node))
    named: dict[str, Any] = {"_execution_whitelist_": targets}
    allowed = named if named.keys() <= inspect.signature(instantiate).parameters.keys() else {}
    return instantiate({**node, "_partial_": True}, _convert_="all", **allowed)


def mistake(error: Exception) -> UserError:
    """Return the error in one line; Hydra's own errors have it as their cause."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else None
    return UserError(" ".join(str(cause or error).split()))
