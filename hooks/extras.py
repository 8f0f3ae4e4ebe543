"""Choose a project's extras for an update: `scripts/dev.py update --add ... --remove ...` calls it.

usage: python hooks/extras.py RECORD [--add NAMES] [--remove NAMES]

RECORD is a project's .template.json. The project gets this state of the template, so the names are
those of this state, and former names. The output is JSON: `extras` is the new answer, `says` is
the line to print before anything changes.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from hooks.answers import EXTRAS, FORMER, RENAMED, Refused, check  # noqa: E402

COMMAND = "python3 scripts/dev.py update"


def main(arguments: list[str]) -> None:
    """Print the new answer."""
    parser = argparse.ArgumentParser(prog="hooks/extras.py")
    parser.add_argument("record", type=Path)
    parser.add_argument("--add", default="")
    parser.add_argument("--remove", default="")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text("utf-8"))
    try:
        print(json.dumps(choose(record["answers"]["extras"], options.add, options.remove)))
    except Refused as refused:
        sys.exit(f"Error: {refused}")


def choose(answer: str, add: str, remove: str) -> dict[str, Any]:
    """Return the new answer to the question `extras`, and the line that tells what changes.

    Args:
        answer: the project's answer so far.
        add: names to add, or `all`.
        remove: names to remove, or `all`.

    Raises:
        Refused: a name is unknown or absent.
    """
    present = set(check("extras", answer))
    added = names_to_add(add, present) - present
    removed = names_to_remove(remove, present)
    chosen = (present | added) - removed
    if chosen == set(EXTRAS) and (answer == "all" or add == "all"):
        text = "all"  # also those that later states bring
    else:
        text = listed(chosen) or "none"
    return {
        "extras": text,
        "says": f"adds {listed(added) or 'nothing'}, removes {listed(removed) or 'nothing'}",
    }


def names_to_add(text: str, present: set[str]) -> set[str]:
    """Return the extras that a text names; former extras are left out."""
    if text == "none":
        remedy = f'name them: {COMMAND} --remove "{listed(present)}"'
        raise Refused(f"--add=none adds nothing; to remove extras, {remedy}")
    if text == "all":
        return set(EXTRAS)
    return known(text, "--add") & set(EXTRAS)


def names_to_remove(text: str, present: set[str]) -> set[str]:
    """Return the extras that a text names, all of which the project has."""
    if text == "all":
        return present
    for name in sorted(known(text, "--remove")):
        if name not in EXTRAS:
            raise Refused(f"--remove={name} is not an extra: every project has it, or none does")
        if name not in present:
            has = listed(present) or "none"
            raise Refused(f"--remove={name} is not in the project, whose extras are: {has}")
    return known(text, "--remove")


def known(text: str, option: str) -> set[str]:
    """Return the names in a text, each former name of an extra as its name now."""
    names = {RENAMED.get(word, word) for word in re.split(r"[\s,]+", text) if word}
    for name in sorted(names - set(EXTRAS) - FORMER):
        near = difflib.get_close_matches(name, EXTRAS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Refused(f"{option}={name} is not one of {', '.join(EXTRAS)}, or all{hint}")
    return names


def listed(names: Iterable[str]) -> str:
    """Return names as one text, in the order of `EXTRAS`."""
    return " ".join(name for name in EXTRAS if name in set(names))


if __name__ == "__main__":
    main(sys.argv[1:])
