"""Settings of extras that earlier versions had, and froze, without the extras."""

from typing import Any

# Group -> setting -> what it was by default.
FORMER: dict[str, dict[str, Any]] = {
    "checkpoint": {"background": False, "copy_to": None},
    "launch": {"warm": None},
    "model": {"init_from": None},
}


def drop_defaults(values: dict[str, Any], known: dict[str, Any]) -> None:
    """Take out of frozen `values` what nobody asked for of extras that are not here.

    What somebody did ask for stays, and is refused by its name.
    """
    for group, former in FORMER.items():
        given = values.get(group, {})
        for name, default in former.items():
            if not hasattr(known[group], name) and given.get(name, ...) == default:
                del given[name]
