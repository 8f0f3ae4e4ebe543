import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKED = {".py", ".yaml", ".json", ".html", ".css", ".js"}  # the package's file types


def files(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in files}


def packed(names: set[str]) -> set[str]:
    return {name for name in names if Path(name).suffix in PACKED}


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.iterdir())


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def test_a_wheel_is_the_package_and_the_configs_and_nothing_else(wheel):
    configs = {f"lockstep_gpt/configs/{name}" for name in files(ROOT / "configs")}
    assert "lockstep_gpt/configs/train.yaml" in configs
    sources = files(ROOT / "src") | configs
    assert packed(content(wheel)) == packed(sources)
    assert content(wheel) <= sources  # your own files may have other types
    assert not [name for name in content(wheel) if "__pycache__" in name]


@pytest.mark.slow
def test_an_sdist_gives_the_same_wheel(wheel, sdist, tmp_path):
    assert content(build(sdist, "wheel", tmp_path)) == content(wheel)


def test_an_sdist_contains_all_files_for_setup_and_tests(sdist):
    needed = {"README.md", "pyproject.toml", "constraints.txt", "scripts/dev.py"}
    needed |= {path.name for path in ROOT.glob("LICENSE")}
    assert all((sdist / name).is_file() for name in needed)
    assert packed(files(sdist / "tests")) == packed(files(ROOT / "tests"))


def test_an_sdist_contains_no_junk(sdist):
    folders = {path.name for path in sdist.iterdir() if path.is_dir()}
    wanted = {"src", "configs", "docs", "tests", "scripts"}
    assert folders == {name for name in wanted if (ROOT / name).is_dir()}
    assert not list(sdist.rglob("__pycache__"))
