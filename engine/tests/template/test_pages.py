"""Our pages are short, complete, and lead to what exists, here and in new projects.

A project's owner may write, change, and delete pages, so projects don't have these tests.
"""

import re
import subprocess
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml


def pages_of(repository: Path) -> list[Path]:
    pages = [*sorted(repository.glob("docs/*.md")), *sorted(repository.glob("engine/docs/*.md"))]
    top = ("README.md", "AGENTS.md", "engine/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    return [*(repository / name for name in top if (repository / name).is_file()), *pages]


def package_of(repository: Path) -> Path:
    (package,) = (path.parent for path in repository.glob("src/*/train.py"))
    return package


def settings_of(repository: Path) -> set[str]:
    """Return the settings that the YAML files have, by their full names."""
    names = {*settings_in(repository / "configs/train.yaml")}
    ours = repository.glob("engine/src/lockstep/configs/*/*.yaml")
    for path in [*repository.glob("configs/*/*.yaml"), *ours]:
        text = path.read_text("utf-8")
        group = path.parent.name
        prefix = "" if "@package _global_" in text or group == "experiment" else f"{group}."
        names |= {f"{prefix}{name}" for name in settings_in(path)}
        if group == "source":  # data=NAME has the source of this name
            names |= {"data.source", *(f"data.source.{name}" for name in settings_in(path))}
    return names


def settings_in(path: Path) -> Iterator[str]:
    """Yield the names of a YAML file's settings, those in others with a dot."""

    def named(node: Any, prefix: str) -> Iterator[str]:
        for name, value in node.items() if isinstance(node, dict) else ():
            yield f"{prefix}{name}"
            yield from named(value, f"{prefix}{name}.")

    yield from named(yaml.safe_load(path.read_text("utf-8")), "")


def test_settings_are_named_as_on_the_command_line(tmp_path):
    (tmp_path / "configs/optim").mkdir(parents=True)
    (tmp_path / "configs/source").mkdir()
    (tmp_path / "configs/train.yaml").write_text("seed: 1\nbatch:\n  micro_size: 2\n")
    (tmp_path / "configs/optim/a.yaml").write_text("# @package _global_\noptim:\n  lr: 1\n")
    (tmp_path / "configs/source/b.yaml").write_text("path: x\n")
    names = {"seed", "batch", "batch.micro_size", "optim", "optim.lr"}
    assert settings_of(tmp_path) == {*names, "source.path", "data.source", "data.source.path"}


GROUPS = (
    r"batch|callbacks\.(?:sample|progress|replays|sync_panel)|checkpoint|data|data\.source|guard|"
    r"launch|logger\.\w+|model|optim|schedule|strategy|trainer"
)
NAMED = re.compile(rf"(?<![\w.+/@])(?:{GROUPS})\.(?!py\b)[a-z]\w*(?![\w.(]|\.\w|/)")
# Pages that add settings, which their tests run, or name those of earlier versions.
WITH_OTHERS = ("own_model.md", "from_0_2.md", "CHANGELOG.md")
# Arguments that no YAML file lists, and what only looks like a setting.
ELSEWHERE = re.compile(
    r"trainer\.(?!devices|num_nodes|accelerator)\w+|logger\.mlflow\.prefix"  # Lightning's own
    r"|launch\.(rdzv_endpoint|node_rank|min_nodes|join_seconds|lost_seconds|keep_memory)"
    r"|callbacks\.sync_panel\.ranks"
    r"|model\.(safetensors|module|blocks)"  # a file, attributes
    r"|batch\.accumulation"  # an attribute
    r"|data\.(source\.count|rows)"  # of an example
    r"|model\.n_layers"  # a mistake, as an example
)


def test_settings_in_pages_exist(repository):
    """Each one on a command line, or in a sentence."""
    known = settings_of(repository)
    gone = []
    for page in pages_of(repository):
        if page.name in WITH_OTHERS:
            continue
        text = page.read_text("utf-8")
        for span in re.findall(r"`[^`\n]+`|^[\w-]+ (?:train|prepare) .+$", text, re.MULTILINE):
            named = [name for name in NAMED.findall(span) if not ELSEWHERE.fullmatch(name)]
            gone += [f"{page.name}: {name}" for name in named if name not in known]
    assert gone == []


def test_the_table_for_readers_of_tutorials_names_existing_files_and_settings(repository):
    page = (repository / "engine/docs/lightning.md").read_text("utf-8")
    engine = repository / "engine/src/lockstep"
    rows = re.findall(r"^\| (`.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) > 12
    settings = settings_of(repository)
    for _, ours, place in rows:
        for name in re.findall(r"`(\S+\.(?:py|yaml))`", place):
            assert (engine / name).exists(), name
        for name in NAMED.findall(ours):
            assert name in settings or ELSEWHERE.fullmatch(name), name


def test_the_rules_for_colleagues_are_short_and_name_what_exists(repository):
    text = (repository / "AGENTS.md").read_text("utf-8")
    assert len(text.splitlines()) < 60
    assert "template" not in text
    for path in re.findall(r"`((?:configs|src|scripts|tests|docs|engine)/[\w/.]*)`", text):
        assert (repository / path).exists(), path


def test_the_readme_is_short_enough_to_be_read(repository):
    assert len((repository / "README.md").read_text("utf-8").splitlines()) <= 150


def test_the_readme_s_tree_shows_every_module_of_the_package_and_existing_folders(repository):
    readme = (repository / "README.md").read_text("utf-8")
    (tree,) = re.findall(r"^```text\n(configs/.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    lines = tree.splitlines()
    assert 6 <= len(lines) <= 20
    assert [line for line in lines if len(line) > 100] == []
    folders = {line.split()[0].rstrip(",") for line in lines if line[0] != " "} - {"data/"}
    assert [name for name in folders if not (repository / name).is_dir()] == []
    package = package_of(repository)
    assert f"{package.relative_to(repository)}/" in folders
    shown = {name for line in lines if line[0] == " " for name in re.findall(r"\w+\.py", line)}
    assert shown == {path.name for path in package.glob("*.py") if path.name[0] != "_"}


def test_the_readme_shows_train_py_as_it_is(repository):
    readme = (repository / "README.md").read_text("utf-8")
    (shown,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert "callbacks=[" in shown
    source = (package_of(repository) / "train.py").read_text("utf-8")
    assert textwrap.indent(shown, "    ") in source


def test_the_comparison_has_a_link_and_all_cells_for_every_project(template):
    page = (template / "docs/coming_from.md").read_text("utf-8")
    (table,) = re.findall(r"^\| \| made for .+\n\|[-|]+\n((?:\|.+\n)+)", page, re.MULTILINE)
    header = re.findall(r"^\| \| made for .+$", page, re.MULTILINE)[0]
    ours, *others = table.splitlines()
    assert len(others) > 6
    for row in (ours, *others):
        assert row.count("|") == header.count("|"), row
    for row in others:
        name, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert re.fullmatch(r"\[.+\]\(https://github\.com/\S+\)", name), row
        assert all(cells), row
    assert re.search(r"We read these facts in \w+ 20\d\d", page)


def words_of(texts: Iterable[str]) -> int:
    return sum(len(text.split()) for text in texts)


def test_pages_are_few_and_short_enough_to_be_read(template, baked):
    """Say less elsewhere before you raise a limit."""
    own = [path.read_text("utf-8") for path in baked().glob("docs/*.md")]
    assert len(own) <= 7
    assert words_of(own) <= 8_500
    engine = [path.read_text("utf-8") for path in template.glob("engine/docs/*.md")]
    assert len(engine) <= 12
    assert words_of(engine) <= 10_500
    ours = [path.read_text("utf-8") for path in template.glob("docs/*.md")]
    assert words_of(ours) <= words_of(own) + 1_500


def test_every_readme_says_what_has_run_on_a_gpu(template, baked):
    """A project's README quotes ours."""
    ours, theirs = (
        " ".join((folder / "README.md").read_text("utf-8").split())
        for folder in (template, baked())
    )
    (sentence,) = re.findall(r"The GPU code has run on .+?\)\)\.", ours)
    assert sentence in theirs


def test_each_bug_of_lightning_names_a_test_that_exists(template):
    page = (template / "docs/coming_from.md").read_text("utf-8")
    section = page.partition("\n## Lightning bugs you don't get here\n")[2]
    rows = re.findall(r"^\| (#.+?) \| .+ \| `(.+?)::(.+?)` \|$", section, re.MULTILINE)
    assert len(rows) >= 10
    lost = [
        f"{issues}: {file}::{name}"
        for issues, file, name in rows
        if f"\ndef {name}(" not in (template / "engine/tests" / file).read_text("utf-8")
    ]
    assert lost == []


def test_links_lead_to_existing_files(repository):
    for page in pages_of(repository):
        links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        files = [link for link in links if "://" not in link]
        assert [link for link in files if not (page.parent / link).exists()] == [], page.name


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def test_links_lead_to_existing_headings(repository):
    gone = []
    for page in pages_of(repository):
        for name, anchor in re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text("utf-8")):
            target = page.parent / name if name else page
            if anchor not in anchors_of(target):
                gone.append(f"{page.name}: {name}#{anchor}")
    assert gone == []


def test_every_page_is_in_the_index(repository):
    index = (repository / "README.md").read_text("utf-8")
    names = {path.name for path in repository.glob("docs/*.md")}
    assert {name for name in names if f"](docs/{name}" not in index} == set()


ADDED = {  # page -> files that it adds, changes that it makes
    "docs/own_model.md": (12, 2),
    "docs/own_data.md": (4, 0),
    "engine/docs/tokens.md": (1, 0),
}


@pytest.mark.parametrize("page", ADDED)
def test_pages_on_own_parts_add_new_files_and_their_changes_fit_once(repository, page):
    text = (repository / page).read_text("utf-8")
    files = re.findall(r"^`(\S+)`:\n\n```", text, re.MULTILINE)
    changes = re.findall(r"^In `(\S+)`.+?```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert (len(files), len(changes)) == ADDED[page]
    assert [name for name in files if (repository / name).exists()] == []
    for name, change in changes:
        old = "".join(line[1:] for line in change.splitlines(keepends=True) if line[0] != "+")
        assert (repository / name).read_text("utf-8").count(old) == 1, old


def test_each_common_change_touches_at_most_two_files_in_existing_folders(repository):
    page = (repository / "docs/own_model.md").read_text("utf-8")
    (table,) = re.findall(r"^\| to add \|.+\n\|---\|---\|\n((?:\|.+\n)+)", page, re.MULTILINE)
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) > 10
    for change, cell in rows:
        files = re.findall(r"`([\w/]+\.\w+)`", cell)
        assert len(files) <= 2, change
        assert files or "example](#" in cell, change
        for file in files:
            place = file.partition("NAME")[0]  # the folder of a new file, or an existing file
            roots = (repository, package_of(repository))
            assert any((root / place).exists() for root in roots), f"{change}: {file}"


def table_of(page: str, header: str) -> list[tuple[str, str]]:
    """Return the rows of a table of two columns."""
    (table,) = re.findall(rf"^\| {header} \| now \|\n\|-.+\n((?:\|.+\n)+)", page, re.MULTILINE)
    return re.findall(r"^\| (.+) \| (.+) \|$", table, re.MULTILINE)


def test_new_names_for_projects_of_0_2_exist(template):
    page = (template / "docs/from_0_2.md").read_text("utf-8")
    modules = table_of(page, r"of 0\.2, in `PACKAGE`")
    assert len(modules) > 15
    for name in re.findall(r"`((?:PACKAGE|lockstep)\.[\w.]+)`", str(modules)):
        dotted = name.replace("PACKAGE", "lockstep_gpt").removesuffix(".NAME")
        resolve_name(dotted)
    settings = table_of(page, r"setting of 0\.2")
    known = settings_of(template)
    new = [name for _, cell in settings for name in re.findall(r"`([a-z][\w.]+)(?=[`:=])", cell)]
    assert len(new) > 12
    assert [name for name in new if name not in known and not name.startswith("PACKAGE")] == []


def test_the_command_for_projects_of_0_2_lists_what_is_the_owner_s(
    template, made, committed, tmp_path
):
    page = (template / "docs/from_0_2.md").read_text("utf-8")
    (command,) = re.findall(r"^```bash\n(.+)\n```$", page, re.MULTILINE)
    project = committed(made(tmp_path / "my-gpt"))
    (project / "src/my_gpt/own.py").write_text("own = 1\n")
    (project / "configs/train.yaml").write_text("seed: 2\n")
    committed(project)
    done = subprocess.run(
        ["bash", "-c", command], cwd=project, check=True, capture_output=True, encoding="utf-8"
    )
    listed = re.findall(r"^ (\S+) +\|", done.stdout, re.MULTILINE)
    assert listed == ["configs/train.yaml", "src/my_gpt/own.py"]


def test_every_experiment_of_ours_names_its_budget_and_its_batch(repository):
    presets = sorted(repository.glob("configs/experiment/*.yaml"))
    assert len(presets) > 3
    for path in presets:
        assert {"max_steps", "batch"} <= set(yaml.safe_load(path.read_text("utf-8"))), path.stem
