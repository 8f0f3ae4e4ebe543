"""The README is short, and docs/house.md names every file; tests/docs/ run their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tree_names_every_source_file_once():
    tree = (ROOT / "docs/house.md").read_text(encoding="utf-8")
    files = {path.name for path in (ROOT / "src").rglob("*.py")} - {"__init__.py"}
    assert {name for name in files if len(re.findall(rf"\b{name}\b", tree)) != 1} == set()


def test_readme_is_short_enough_to_be_read():
    shown = [line for line in README.splitlines() if not line.startswith("<!--")]
    assert len(shown) <= 250
