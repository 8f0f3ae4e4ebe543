"""What extras add to the core; each package in `extras/` states it in its own `__init__`.

The core asks for constants by their kind and names no extra. Most are `module:name`, imported
where they are used: a command does not pay for an extra that it does not need.
"""

import functools
import importlib
from collections.abc import Iterator
from pkgutil import iter_modules, resolve_name
from typing import Any

from lockstep_gpt import extras

# Their names in given folders, listed once: a command asks for them hundreds of times.
_names = functools.cache(lambda *folders: sorted(each.name for each in iter_modules(folders)))


def additions(kind: str) -> Iterator[Any]:
    """Yield what each extra that is here adds of one kind, by the names of the extras."""
    for name in _names(*extras.__path__):
        package = importlib.import_module(f"{extras.__name__}.{name}")
        if hasattr(package, kind):
            yield getattr(package, kind)


def merged(kind: str) -> dict[str, Any]:
    """Return the tables of one kind of all extras as one table."""
    return {name: each for table in additions(kind) for name, each in table.items()}


def asked(kind: str, *arguments: Any) -> list[Any]:
    """Call the target of one kind of each extra that adds it; return what they return."""
    return [resolved(target)(*arguments) for target in additions(kind)]


def addition(kind: str) -> Any:
    """Return what the target of one kind leads to; None where no extra adds it."""
    return next(map(resolved, additions(kind)), None)


def resolved(target: str) -> Any:
    """Import what `module:name` names, or `module` alone; `.module` is of this package."""
    return resolve_name(f"{__package__}{target}" if target[0] == "." else target)
