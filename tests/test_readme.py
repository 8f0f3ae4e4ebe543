"""The README is short, and docs/house.md names every file; tests/docs/ run their commands."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOUSE = (ROOT / "docs/house.md").read_text(encoding="utf-8")


def test_tree_names_every_source_file_once():
    tree = "\n".join(re.findall(r"^```text\n(.*?)^```", HOUSE, re.MULTILINE | re.DOTALL))
    files = {path.name for path in (ROOT / "src").rglob("*.py")} - {"__init__.py"}
    assert {name for name in files if len(re.findall(rf"\b{name}\b", tree)) != 1} == set()


def test_readme_is_short_enough_to_be_read():
    shown = [line for line in README.splitlines() if not line.startswith("<!--")]
    assert len(shown) <= 250


def test_the_page_explains_exactly_the_constants_of_extras():
    core = [path for path in (ROOT / "src").rglob("*.py") if "extras" not in path.parts]
    asking = re.compile(r'\b(?:additions|addition|asked|merged)\(\s*"(\w+)"')
    kinds = {kind for path in core for kind in asking.findall(path.read_text("utf-8"))}
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", HOUSE, re.MULTILINE)) == kinds
