"""What each extra offers, also where it is not installed: for the line that says how to add it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lockstep_gpt import registry


class Offer(NamedTuple):
    """An extra's purpose, and the names by which people ask for it."""

    purpose: str
    commands: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # of settings
    choices: tuple[str, ...] = ()  # of other groups, as GROUP=CHOICE


CATALOG = {
    "cluster": Offer(
        "plans of a run, checks of machines, drills",
        commands=("plan", "doctor", "drill"),
    ),
    "datasets": Offer(
        "several sources at once, documents kept apart, packing",
        groups=("documents",),
        choices=("data=mixture", "packing=documents"),
    ),
    "evidence": Offer(
        "verdicts on whether a change helps, and runs checked bit by bit",
        commands=("compare", "verify"),
    ),
    "hub": Offer("export to Hugging Face, and start from its models", commands=("export",)),
    "pages": Offer(
        "the report of a run, and a page that shows the all-reduce",
        commands=("panel", "report"),
        choices=("callbacks=sync_panel",),
    ),
}


GROUPS = [group for offer in CATALOG.values() for group in offer.groups]


def extra_of_command(name: str) -> str | None:
    """Return the extra that adds a command and is not installed; None if there is none."""
    return _first_absent(extra for extra, offer in CATALOG.items() if name in offer.commands)


def extra_of_group(name: str) -> str | None:
    """Return the extra that adds a group of settings and is not installed, or None."""
    return _first_absent(extra for extra, offer in CATALOG.items() if name in offer.groups)


def extra_of_choice(group: str, choice: str) -> str | None:
    """Return the extra that adds a choice of a group and is not installed, or None."""
    override = f"{group}={choice}"
    return _first_absent(extra for extra, offer in CATALOG.items() if override in offer.choices)


def extra_of_target(target: str) -> str | None:
    """Return the extra that contains a `_target_` and is not installed, or None."""
    prefix = f"{__package__}.extras."
    if not target.startswith(prefix):
        return None
    name = target.removeprefix(prefix).partition(".")[0]
    return _first_absent(extra for extra in CATALOG if extra == name)


def how_to_add(extra: str) -> str:
    """Return what an extra is, and the command that adds it."""
    purpose = CATALOG[extra].purpose
    return f"the extra {extra} ({purpose}); add it: python3 scripts/dev.py update --add {extra}"


def _first_absent(extras: Iterable[str]) -> str | None:
    """Return the first of some extras that is not installed; None if there is none."""
    return next((extra for extra in extras if extra not in registry.installed()), None)
