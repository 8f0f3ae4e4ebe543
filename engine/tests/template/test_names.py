"""Names: those with another meaning are rejected, and all others can be imported."""

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from hooks.answers import Refused, checked
from hypothesis import assume, given, settings
from hypothesis import strategies as st

# Names that mean something elsewhere: to Python, to YAML, to the package itself.
TEMPTING = ["cli", "config", "false", "main", "model", "no", "none", "np", "null", "on", "self"]
TEMPTING += ["train", "true", "version", "yes"]
PACKAGES = st.sampled_from(TEMPTING) | st.from_regex(r"[a-z][a-z0-9_]{0,23}", fullmatch=True)
SLUGS = st.sampled_from(TEMPTING) | st.from_regex(
    r"[a-z0-9]{1,8}(-[a-z0-9]{1,7}){0,2}", fullmatch=True
)
LINES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1)


def is_taken(defaults, **answers) -> bool:
    try:
        checked({**defaults, **answers})
    except Refused:
        return False
    return True


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.fixture
def pinned(baked) -> set[str]:
    pins = (baked() / "constraints.txt").read_text()
    return set(map(normal, re.findall(r"^([\w.-]+)==", pins, flags=re.MULTILINE)))


def test_module_names_of_dependencies_are_rejected_as_package(defaults, pinned):
    owners = importlib.metadata.packages_distributions()
    modules = {name for name in owners if pinned & set(map(normal, owners[name]))}
    assert {"torch", "yaml", "PIL", "hydra", "pytest"} <= modules
    assert [name for name in modules if is_taken(defaults, package_name=name.lower())] == []


@pytest.mark.slow
def test_command_names_of_dependencies_are_rejected_as_slug(defaults, pinned):
    distributions = (
        distribution
        for distribution in importlib.metadata.distributions()
        if normal(distribution.name) in pinned
    )
    files = [Path(file) for distribution in distributions for file in distribution.files or []]
    names = {file.name for file in files if file.parts[0] == ".."}  # next to the packages
    assert {"torchrun", "wandb", "pytest", "ruff"} <= names
    assert [name for name in names if is_taken(defaults, project_slug=name.lower())] == []


@pytest.mark.slow
def test_no_slug_hides_a_command_of_a_new_environment(tmp_path, defaults):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True)
    names = {path.name for path in (tmp_path / "bin").iterdir()}
    assert {"activate", "pip", "python"} <= names
    assert [name for name in names if is_taken(defaults, project_slug=name)] == []


def test_no_slug_hides_a_command_of_a_shell(defaults):
    words = ["bash", "-c", "compgen -b; compgen -k"]
    names = subprocess.run(words, capture_output=True, encoding="utf-8", check=True).stdout.split()
    assert {"cd", "test", "while"} <= set(names)
    assert [name for name in names if is_taken(defaults, project_slug=name)] == []


def test_no_package_hides_a_module_of_python_or_hides_behind_one(defaults):
    library = Path(sysconfig.get_path("stdlib"))
    names = {path.stem for path in library.iterdir() if path.suffix == ".py"}
    names |= {path.parent.name for path in library.glob("*/__init__.py")}
    assert {"json", "test"} <= names
    assert [name for name in names if is_taken(defaults, package_name=name)] == []


def test_no_package_hides_behind_a_script(defaults, template):
    names = {path.stem for path in template.glob("scripts/**/*.py")}
    assert {"dev", "update"} <= names
    assert [name for name in names if is_taken(defaults, package_name=name)] == []


def test_names_of_24_characters_and_of_one_are_taken(defaults):
    assert is_taken(defaults, package_name="x" * 24, project_slug="x" * 24)
    assert is_taken(defaults, package_name="x", project_slug="x")


@pytest.mark.slow
@settings(max_examples=25)
@given(package=PACKAGES, slug=SLUGS, author=LINES.map(lambda line: line.strip() or "x"))
def test_every_accepted_package_name_can_be_imported(
    made, defaults, environment, projects, package, slug, author
):
    answers = {"package_name": package, "project_slug": slug, "author": author}
    assume(is_taken(defaults, **answers))
    with tempfile.TemporaryDirectory(dir=projects) as folder:
        project = made(Path(folder) / slug, **answers)
        # An editable installation comes after the standard library and all installed packages.
        code = f"import sys; sys.path.append({str(project / 'src')!r}); "
        code += f"import {package}.__main__; print({package}.PROJECT.program)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=project / "scripts",
            env=environment(PYTHONDONTWRITEBYTECODE="1"),
            capture_output=True,
            encoding="utf-8",
        )
    assert (done.stdout, done.stderr) == (f"{slug}\n", "")
