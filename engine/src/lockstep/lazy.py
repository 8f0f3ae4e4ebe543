"""Names of a package that are imported when they are first used.

A command that only reports a mistake then needs neither torch nor Lightning.
"""

import sys
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any


def lazily(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

        __getattr__, __dir__ = lazily(__name__, {"Mean": "lockstep.metrics.mean:Mean"})

    Args:
        package: its name.
        places: public name -> where it is, as `module:name`.
    """

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = resolve_name(places[name])
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: [*places]
