"""What extras add to the core; each package in `extras/` declares it in its `__init__`.

The core looks up constants by kind and never names an extra. Most are `module:name`, imported
on use, so a command doesn't pay for an extra that it doesn't need.
"""

import functools
import importlib
from collections.abc import Iterator
from pkgutil import iter_modules, resolve_name
from typing import Any

from lockstep_gpt import extras

# The names of extras in the given folders, cached: a command asks for them hundreds of times.
_names = functools.cache(lambda *folders: sorted(each.name for each in iter_modules(folders)))


def additions(kind: str) -> Iterator[Any]:
    """Yield what each installed extra adds of one kind, in the order of the extras' names."""
    for name in _names(*extras.__path__):
        package = importlib.import_module(f"{extras.__name__}.{name}")
        if hasattr(package, kind):
            yield getattr(package, kind)


def merged(kind: str) -> dict[str, Any]:
    """Return all extras' tables of one kind, merged into one."""
    return {name: each for table in additions(kind) for name, each in table.items()}


def asked(kind: str, *arguments: Any) -> list[Any]:
    """Call the target of one kind in every extra that adds it; return the results."""
    return [resolved(target)(*arguments) for target in additions(kind)]


def addition(kind: str) -> Any:
    """Import and return the first extra's target of one kind; None if no extra adds it."""
    return next(map(resolved, additions(kind)), None)


def resolved(target: str) -> Any:
    """Import and return `module:name`, or `module` alone; `.module` is in this package."""
    return resolve_name(f"{__package__}{target}" if target[0] == "." else target)
