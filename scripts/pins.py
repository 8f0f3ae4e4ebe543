"""Copy the pins of constraints.txt into pyproject.toml, where uv reads them.

usage: python3 scripts/pins.py
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT, PINS = ROOT / "pyproject.toml", ROOT / "constraints.txt"
SECTION = re.compile(r"^constraint-dependencies = \[.*?\]\n", flags=re.MULTILINE | re.DOTALL)


def agreeing(project: str, pins: str) -> str:
    """Return the text of pyproject.toml with the pins of constraints.txt."""
    listed = [f'    "{line}",' for line in pins.splitlines() if "==" in line]
    section = "\n".join(["constraint-dependencies = [", *listed, "]\n"])
    text, count = SECTION.subn(lambda _: section, project)
    assert count == 1, "pyproject.toml has no constraint-dependencies of [tool.uv]"
    return text


def main() -> int:
    """Update pyproject.toml."""
    text = agreeing(PROJECT.read_text("utf-8"), PINS.read_text("utf-8"))
    PROJECT.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
