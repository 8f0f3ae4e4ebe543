"""Our pages are short, complete, and lead to what exists, here and in new projects.

A project's owner may write, change, and delete pages, so projects don't have these tests.
"""

import re
from pathlib import Path

import yaml


def texts(folder: Path) -> dict[str, str]:
    """Return the text of each source file below a folder, by its name."""
    return {path.name: path.read_text("utf-8") for path in folder.rglob("*.py")}


def house_of(repository: Path) -> str:
    return (repository / "docs/house.md").read_text("utf-8")


def pages_of(repository: Path) -> list[Path]:
    return [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]


def test_the_house_s_tree_names_every_source_file_once(repository):
    tree = "\n".join(
        re.findall(r"^```text\n(.*?)^```", house_of(repository), re.MULTILINE | re.DOTALL)
    )
    files = {*texts(repository / "src")} - {"__init__.py"}
    assert {name for name in files if len(re.findall(rf"\b{name}\b", tree)) != 1} == set()


def test_the_house_explains_exactly_the_constants_of_extras(repository):
    core = [path for path in (repository / "src").rglob("*.py") if "extras" not in path.parts]
    asking = re.compile(r'\b(?:additions|addition|asked|merged)\(\s*"(\w+)"')
    kinds = {kind for path in core for kind in asking.findall(path.read_text("utf-8"))}
    explained = re.findall(r"^\| `([A-Z_]+)` \|", house_of(repository), re.MULTILINE)
    assert set(explained) == kinds


def test_the_readme_is_short_enough_to_be_read(repository):
    lines = (repository / "README.md").read_text("utf-8").splitlines()
    assert len([line for line in lines if not line.startswith("<!--")]) <= 250


def test_links_lead_to_existing_files(repository):
    for page in pages_of(repository):
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        files = [link for link in links if "://" not in link]
        assert [link for link in files if not (page.parent / link).exists()] == [], page.name


def test_every_page_is_in_the_index(repository):
    index = (repository / "docs/README.md").read_text("utf-8")
    names = {path.name for path in pages_of(repository)} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


def test_the_page_of_a_step_names_existing_files_and_their_definitions(repository):
    (package,) = (path.parent for path in repository.glob("src/*/config.py"))
    page = (repository / "docs/a_step.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+) \| (.*`.+) \|$", page, re.MULTILINE)
    assert len(rows) > 15
    for about, place in rows:
        files = [package / name for name in re.findall(r"`(\S+\.py)`", place)]
        text = "".join(file.read_text("utf-8") for file in files)
        defined = re.findall(r"(?:class|def) (\w+)", text) + [file.stem for file in files]
        assert set(re.findall(r"^`(\w+)`", about)) <= set(defined), about


def test_the_page_on_extensions_adds_new_files_and_its_changes_fit_once(repository):
    page = (repository / "docs/extend.md").read_text("utf-8")
    files = re.findall(r"^`(\S+)`:\n\n```", page, re.MULTILINE)
    changes = re.findall(r"^In `(\S+)`.+?```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert (len(files), len(changes)) == (11, 2)
    assert [name for name in files if (repository / name).exists()] == []
    for name, change in changes:
        old = "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] != "+")
        assert (repository / name).read_text("utf-8").count(old) == 1, old


def test_every_experiment_of_ours_names_its_budget_and_its_batch(repository):
    presets = sorted(repository.glob("configs/experiment/*.yaml"))
    assert len(presets) > 3
    for path in presets:
        assert {"max_steps", "batch"} <= set(yaml.safe_load(path.read_text("utf-8"))), path.stem
