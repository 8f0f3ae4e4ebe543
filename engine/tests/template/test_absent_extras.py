"""An extra is four places: nothing else names it, and no page needs one that may be absent."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

from hooks.answers import EXTRAS, places
from hooks.contents import MARKED
from hooks.project import TEMPLATE_ONLY

ROOT = Path(__file__).parents[2]
MARKER = re.compile(r"(template-only|extra \w+)(: (begin|end)| -->)")
# These are about all extras.
ON_EXTRAS = "docs/extras.md"
ABOUT_ALL = (*MARKED, ON_EXTRAS, "docs/house.md", "src/lockstep_gpt/cli.py")
# Other files of a project that name an extra, and why.
NAMED_IN = {
    "cluster": {
        "tests/docs/test_commands.py": "its own tests run these commands of pages",
    },
    "datasets": {
        "src/lockstep_gpt/trained_model.py": "it masks as training did",
        "tests/test_evaluate.py": "one loss per source, if there are several",
    },
    "evidence": {},
    "hub": {
        "src/lockstep_gpt/initial_weights.py": "it reads folders for init_from",
    },
    "pages": {
        "tests/extras/datasets/test_document_runs.py": "it shows packed runs, if it is there",
    },
}


def files() -> list[str]:
    """Return the files of the template that projects can have."""
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, encoding="utf-8"
    )
    names = [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]
    return [name for name in names if not name.startswith(TEMPLATE_ONLY)]


FILES = files()


def owner(name: str) -> str | None:
    """Return the extra whose file this is; None for a file of every project."""
    for extra in EXTRAS:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in places(extra)):
            return extra
    return None


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8", errors="ignore")


def test_an_extra_s_file_is_in_one_of_its_four_places():
    assert owner("engine/src/lockstep/mixtures/mixture.py") == "datasets"
    assert owner("configs/data/mixture.yaml") == "datasets"
    assert owner("docs/cluster.md") == "cluster"
    assert owner("tests/extras/hub/test_runs.py") == "hub"
    assert owner("docs/hubs.md") is owner("src/lockstep_gpt/extras/__init__.py") is None


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_has_a_package_and_tests(extra):
    owned = [name for name in FILES if owner(name) == extra]
    assert f"src/lockstep_gpt/extras/{extra}/__init__.py" in owned
    assert any(name.startswith(f"tests/extras/{extra}/test_") for name in owned)


def test_every_folder_of_extras_is_an_extra():
    for place in ("src/lockstep_gpt/extras", "tests/extras"):
        names = [name for name in FILES if name.startswith(f"{place}/")]
        folders = {name.split("/")[len(place.split("/"))] for name in names}
        assert {name for name in folders if not name.endswith(".py")} == {*EXTRAS}


@pytest.mark.parametrize("extra", EXTRAS)
def test_code_outside_an_extra_names_it_in_two_files_at_most(extra):
    """Its modules, or itself in prose."""
    imported = 'import_of_extra\\(.+, "NAME"'
    forms = ("extras[./]NAME\\b", "extras import NAME\\b", "\\bextra `NAME`", imported)
    named = re.compile("|".join(forms).replace("NAME", extra))
    naming = {
        name
        for name in FILES
        if not name.endswith(".md")
        and name not in ABOUT_ALL
        and extra != owner(name)
        and named.search(text_of(name))
    }
    assert naming == {*NAMED_IN[extra]}
    assert len(naming) <= 2


PAGES = [name for name in FILES if name.startswith("docs/") and name.endswith(".md")]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_links_to_no_page_that_may_be_absent(page):
    links = re.findall(r"\]\(([\w./]+)(?:#[^)]*)?\)", text_of(page))
    rows = [line for line in text_of(page).splitlines() if MARKER.search(line)]
    linked = {f"docs/{link}" for link in links if not any(f"]({link})" in row for row in rows)}
    absent = {name for name in linked if owner(name) not in {None, owner(page)}}
    assert absent == set()


@pytest.mark.parametrize("page", [name for name in PAGES if name not in ABOUT_ALL])
def test_a_page_that_needs_an_extra_says_where_to_get_it(page):
    names = set(re.findall(r"\bextra `(\w+)`", text_of(page)))
    assert names <= {*EXTRAS}
    if names - {owner(page)}:
        assert "](extras.md)" in text_of(page)


DEFAULTS = re.compile(r"^  - (?:/?(\w+)@\S+|override /(\w+)): (\w+)$", re.MULTILINE)


def test_no_choice_needs_a_choice_of_an_extra_that_may_be_absent():
    choices = [name for name in FILES if name.startswith("configs/")]
    for name in choices:
        for placed, overridden, choice in DEFAULTS.findall(text_of(name)):
            needed = f"configs/{placed or overridden}/{choice}.yaml"
            assert owner(needed) in {None, owner(name)}, name


def test_every_choice_of_an_extra_exists():
    named = {place for extra in EXTRAS for place in places(extra) if place.startswith("configs/")}
    assert named <= {*FILES}


def test_markers_are_few_and_in_three_files():
    marked = {}
    for name in FILES:
        lines = [line for line in text_of(name).splitlines() if MARKER.search(line)]
        if lines and not name.startswith("tests/"):
            marked[name] = len(lines)
    marked["README.md"] = len(MARKER.findall(text_of("README.md")))  # projects get a part of it
    assert {*marked} <= {*MARKED}
    assert sum(marked.values()) < 60


def test_the_page_on_extras_describes_each_with_its_pages():
    row = re.compile(r"^\| `(\w+)` \| (.+?) \| .+ \|(?: (`.+`))? \|$", re.MULTILINE)
    rows = row.findall(text_of(ON_EXTRAS))
    assert {extra: description for extra, description, _ in rows} == EXTRAS
    for extra, _, named in rows:
        pages = [page for page in PAGES if owner(page) == extra]
        assert re.findall(r"`(.+?)`", named) == pages


def test_the_readme_has_the_command_that_adds_each_extra():
    named = set(re.findall(r"dev\.py update --add (\w+)", text_of("README.md")))
    assert named == {*EXTRAS}
