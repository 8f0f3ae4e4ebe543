"""What is in a wheel and in a source distribution of the project, and in those of its engine."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[2]
FOLDERS = {"lockstep_gpt": ROOT, "lockstep": ROOT / "engine"}


def files(folder: Path) -> set[str]:
    """Return the files below a folder, without what Python writes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in found}
    return {name for name in names if "__pycache__" not in name and ".egg-info" not in name}


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.iterdir())


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module", params=[*FOLDERS])
def package(request):
    return request.param


@pytest.fixture(scope="module")
def wheel(package, tmp_path_factory):
    return build(FOLDERS[package], "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(package, tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(FOLDERS[package], "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def test_a_wheel_is_the_source_and_the_configs_and_nothing_else(package, wheel):
    sources = files(FOLDERS[package] / "src")
    if package == "lockstep_gpt":
        sources |= {f"lockstep_gpt/configs/{name}" for name in files(ROOT / "configs")}
    assert f"{package}/__init__.py" in sources
    assert content(wheel) == sources


def test_a_wheel_of_the_engine_has_its_choices_its_pages_its_types_and_hydra_s_plugins(
    tmp_path_factory,
):
    names = content(build(FOLDERS["lockstep"], "wheel", tmp_path_factory.mktemp("wheel")))
    assert {"lockstep/py.typed", "lockstep/configs/strategy/ddp.yaml"} < names
    assert {name.split("/")[0] for name in names} == {"hydra_plugins", "lockstep"}
    assert {Path(name).suffix for name in names} == {
        ".py",
        ".yaml",
        ".typed",
        ".html",
        ".css",
        ".js",
    }


def test_its_metadata_has_a_license_a_page_and_known_classifiers(package, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(about).decode())
    assert (
        metadata["Name"]
        == {"lockstep_gpt": "lockstep-gpt", "lockstep": "lightning-lockstep"}[package]
    )
    assert metadata["License-Expression"] == "MIT"
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {*metadata.get_all("Classifier", [])} <= classifiers


@pytest.mark.slow
def test_an_sdist_gives_the_same_wheel(wheel, sdist, tmp_path):
    assert content(build(sdist, "wheel", tmp_path)) == content(wheel)


def test_an_sdist_of_the_project_contains_all_files_for_setup_and_tests(package, sdist):
    if package != "lockstep_gpt":
        assert (sdist / "CHANGELOG.md").is_file()
        assert (sdist / "examples/images/train.py").is_file()  # the release trains it
        return
    needed = {"README.md", "pyproject.toml", "constraints.txt", "scripts/dev.py", "LICENSE"}
    assert all((sdist / name).is_file() for name in needed)
    assert files(sdist / "tests") == files(ROOT / "tests")


def test_an_sdist_contains_no_junk(package, sdist):
    folders = {path.name for path in sdist.iterdir() if path.is_dir()}
    wanted = {
        "lockstep_gpt": {"src", "configs", "docs", "tests", "scripts"},
        "lockstep": {"src", "docs", "examples"},
    }
    assert folders == {name for name in wanted[package] if (FOLDERS[package] / name).is_dir()}
    assert not list(sdist.rglob("__pycache__"))


@pytest.mark.slow
def test_the_engine_s_wheel_trains_with_equal_bits_outside_of_the_repository(tmp_path):
    with zipfile.ZipFile(build(FOLDERS["lockstep"], "wheel", tmp_path / "wheel")) as archive:
        archive.extractall(tmp_path / "installed")  # as pip does, without dependencies
    script = shutil.copy(ROOT / "engine/examples/images/train.py", tmp_path)

    def python(*words):
        variables = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
        command = [sys.executable, *words]
        return subprocess.check_output(command, cwd=tmp_path, env=variables, encoding="utf-8")

    place = python("-c", "import lockstep; print(lockstep.__file__)").strip()
    assert Path(place) == tmp_path / "installed/lockstep/__init__.py"
    words = ["--devices={ranks}", "--steps", "2", "--ranks", "1,2"]
    assert "equal bit for bit" in python("-m", "lockstep", "check", script, *words)
