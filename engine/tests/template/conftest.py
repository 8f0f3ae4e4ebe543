"""Shared by the template's tests: a copy of it, and projects generated from it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT))  # `hooks` isn't part of the package
# A source distribution contains the tests, but not the template.
collect_ignore_glob = [] if (ROOT / "hooks").is_dir() else ["*"]

DEFAULTS = {
    "project_name": "My GPT",
    "project_slug": "my-gpt",
    "package_name": "my_gpt",
    "description": "What it is for",
    "author": "Its author",
    "email": "",
    "license": "MIT",
    "wandb_project": "my-gpt",
    "wandb_entity": "",
    "git_init": False,
}
MEMORY = Path("/dev/shm")  # Linux's file system in memory
IN_MEMORY = "lockstep-gpt-tests-"
ROOM = 2 * 10**9  # bytes; these tests use a tenth
FOREIGN = ("COOKIECUTTER", "GIT_", "LOCAL_", "MASTER_", "PYTEST_", "PYTHON", "RANK", "WORLD_")


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest knows this option if its arguments name tests in this folder."""
    parser.addoption(
        "--whole-projects",
        action="store_true",
        help="install a generated project with pip, and run all of its tests",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.template)


@dataclass(frozen=True)
class Generator:
    """Runs the real `cookiecutter`, isolated from the user's settings."""

    home: Path
    template: str
    python: str  # its forks have slow imports done

    @property
    def config(self) -> Path:
        """The settings of cookiecutter, with its folders in our temporary home."""
        folders = {"cookiecutters_dir": self.home / "clones", "replay_dir": self.home / "replay"}
        self.home.mkdir(parents=True, exist_ok=True)
        path = self.home / "cookiecutter.yaml"
        path.write_text(json.dumps(folders, default=str))
        return path

    def of(self, template: Path | str) -> Generator:
        """Return the same for another template: a path, a zip, or a URL."""
        return replace(self, template=str(template))

    def run(
        self, module: str, *words: str | Path, cwd: Path, typed: str = "", status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python command in `cwd`, created if missing, and check its exit status."""
        cwd.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [self.python, "-m", module, *map(str, words)],
            cwd=cwd,
            env=environment(
                OMP_NUM_THREADS="1",  # otherwise, it would not be a fork
                HOME=str(self.home),
                XDG_CONFIG_HOME=str(self.home / ".config"),
                COOKIECUTTER_CONFIG=str(self.config),
            ),
            input=typed,
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        assert done.returncode == status, f"{words}\n{done.stdout}\n{done.stderr}"
        return done

    def __call__(
        self, folder: Path, *words: str | Path, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Generate into `folder` without prompts; `words` are options and answers."""
        options = [self.template, "--no-input", "-o", folder]
        return self.run("cookiecutter", *options, *words, cwd=self.home, status=status)


def environment(**extra: str) -> dict[str, str]:
    """Return the environment without the variables of git, a launcher, or a test run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # Projects of tests need not survive a power failure, and to make sure of it takes time.
    no_fsync = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.fsync",
        "GIT_CONFIG_VALUE_0": "none",
    }
    return {**inherited, "WANDB_MODE": "offline", **no_fsync, **extra}


def git(folder: Path, *words: str) -> str:
    """Run git in `folder` with a test identity, and return its output."""
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(
        ["git", *who, *words],
        cwd=folder,
        env=environment(),
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return done.stdout


def committed(folder: Path) -> Path:
    """Make `folder` a git repository if it isn't one, commit everything, and return it."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "All of it")
    return folder


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Let one worker of pytest-xdist create `folder`; the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a worker that failed
            make(folder)
            done.touch()
    return folder


def _lock(folder: Path, kind: int) -> int | None:
    """Lock a folder until this process ends; None if it is gone, or others keep it."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(number, kind | fcntl.LOCK_NB)
            if folder.stat().st_ino == os.fstat(number).st_ino:
                return number
        except OSError:
            pass
        os.close(number)
    return None


@pytest.fixture(scope="session")
def projects(request: pytest.FixtureRequest, shared: Path) -> Iterator[Path]:
    """A folder that all workers share, in memory if there is room.

    Not with `--whole-projects`: an environment takes more than a gigabyte.

    These tests create and delete a hundred thousand files. ext4 does not use the inode of a deleted
    file again for minutes, and searches the longer for another one.
    """
    whole = request.config.getoption("--whole-projects", default=False)
    if whole or not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield shared
        return
    folder = MEMORY / (IN_MEMORY + "-".join(shared.parts[1:]))
    for left in {*MEMORY.glob(f"{IN_MEMORY}*")} - {folder}:  # by sessions that were killed
        if (lock := _lock(left, fcntl.LOCK_EX)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    lock = None
    while lock is None:  # another session may have found it before it was locked
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _lock(folder, fcntl.LOCK_SH)
    yield folder
    os.close(lock)
    if (lock := _lock(folder, fcntl.LOCK_EX)) is not None:  # no other worker uses it
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@pytest.fixture
def tmp_path(projects: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test, next to the shared projects; also for what its commands create."""
    with tempfile.TemporaryDirectory(dir=projects, ignore_cleanup_errors=True) as folder:
        if projects.is_relative_to(MEMORY):
            other = Path(folder, "tmp")
            other.mkdir()
            monkeypatch.setenv("TMPDIR", str(other))
        own = Path(folder, "test")
        own.mkdir()
        yield own


def _copy_template(target: Path) -> None:
    from hooks.project import committed_files

    for name in committed_files(ROOT):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    committed(target)


@pytest.fixture(scope="session")
def template(projects: Path) -> Path:
    """The template as git would commit it, in a separate repository. Read only."""
    return once(projects / "template", _copy_template)


@pytest.fixture(scope="session")
def generate(
    template: Path, tmp_path_factory: pytest.TempPathFactory, forks_of: Callable[..., str]
) -> Generator:
    python = forks_of(
        "tools", "cookiecutter.cli", "cookiecutter.extensions", "git", "rich.prompt", "typer"
    )
    return Generator(tmp_path_factory.mktemp("home"), str(template), python)


@pytest.fixture(scope="session")
def baked(projects: Path, generate: Generator) -> Callable[..., Path]:
    """Return the project for some answers, generated once for all tests. Read only."""

    def bake(**answers: str) -> Path:
        words = ["git_init=no", *(f"{name}={value}" for name, value in answers.items())]
        folder = projects / "baked" / ",".join(words)
        once(folder, lambda folder: generate(folder, *words))
        return folder / answers.get("project_slug", "my-gpt")

    return bake


@pytest.fixture(params=["ours", "a project"])
def repository(request: pytest.FixtureRequest, template: Path, baked: Callable[..., Path]) -> Path:
    """The template, or a project. Read only."""
    return template if request.param == "ours" else baked()


def as_zip(template: Path, path: Path) -> Path:
    """Zip the template as forges do, in one folder; writing by name drops executable bits."""
    files = [file for file in sorted(template.rglob("*")) if file.is_file()]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("lockstep-gpt-main/", "")
        for file in files:
            name = file.relative_to(template).as_posix()
            if not name.startswith(".git/"):
                archive.writestr(f"lockstep-gpt-main/{name}", file.read_bytes())
    return path


@pytest.fixture
def zipped(template: Path, tmp_path: Path) -> Path:
    """A zip of the template."""
    return as_zip(template, tmp_path / "main.zip")


@pytest.fixture(scope="session")
def defaults() -> dict[str, object]:
    return dict(DEFAULTS)


@pytest.fixture(scope="session")
def made(template: Path, defaults: dict[str, object]) -> Callable[..., Path]:
    """Generate a project in a folder without cookiecutter, from the defaults and other answers."""
    from hooks.answers import checked
    from hooks.project import make

    def make_in(folder: Path, **answers: object) -> Path:
        folder.mkdir(parents=True)
        (folder / "README.md").touch()
        make(template, folder, checked({**defaults, **answers}))
        return folder

    return make_in


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, tuple[bool, bytes]]]:
    """Return the files below a folder: name -> whether executable, content. Without .git."""

    def files(folder: Path) -> dict[str, tuple[bool, bytes]]:
        paths = (path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        return {
            name: (os.access(path, os.X_OK), path.read_bytes())
            for name, path in sorted(names.items())
            if not name.startswith(".git/")
        }

    return files


@pytest.fixture(scope="session", name="git")
def git_fixture() -> Callable[..., str]:
    return git


@pytest.fixture(scope="session", name="committed")
def committed_fixture() -> Callable[[Path], Path]:
    return committed


@pytest.fixture(scope="session", name="environment")
def environment_fixture() -> Callable[..., dict[str, str]]:
    return environment


@pytest.fixture(scope="session", name="once")
def once_fixture() -> Callable[[Path, Callable[[Path], object]], Path]:
    return once


@pytest.fixture(scope="session")
def types(shared: Path) -> Callable[[str], Path]:
    """Return mypy's cache of projects in one kind of environment, by its name.

    It is next to the one of this repository and begins as its copy: mypy needs half a minute for
    the libraries, which it reads again in an environment that has others of them. It stays for
    later sessions: mypy compares a file's content if its folder or its time differs.
    """

    def cache_folder(environment: str) -> Path:
        folder = ROOT / ".mypy_cache" / f"of_projects_{environment}"

        def copy_ours(_: Path) -> None:
            if folder.is_dir() or not (ROOT / ".mypy_cache").is_dir():
                return
            new = folder.with_name(f"{folder.name}_{os.getpid()}")
            ours = shutil.ignore_patterns("of_projects_*")
            shutil.copytree(ROOT / ".mypy_cache", new, ignore=ours)
            try:
                new.rename(folder)
            except OSError:  # another session was first
                shutil.rmtree(new)

        once(shared / f"types_{environment}", copy_ours)
        return folder

    return cache_folder


@pytest.fixture
def mypy(types: Callable[[str], Path]) -> Callable[[Path], list[str]]:
    """Return a function that returns the arguments with which Python checks a project's types."""

    def words(project: Path) -> list[str]:
        settings = str(project / "pyproject.toml")
        return ["-m", "mypy", "--config-file", settings, "--cache-dir", str(types("here"))]

    return words


@pytest.fixture
def upstream(template: Path, tmp_path: Path) -> Path:
    """A clone of the template that tests may change."""
    git(tmp_path, "clone", "-q", str(template), "upstream")
    return tmp_path / "upstream"


@pytest.fixture(scope="session")
def begun() -> Callable[[Path], Path]:
    """Make user changes in a project that every update must keep."""

    def change(project: Path) -> Path:
        last = "# the user's last line\n"
        for name in ("src/my_gpt/gpt.py", "README.md"):
            text = (project / name).read_text("utf-8")
            (project / name).write_text(text + last, "utf-8")
        (project / "src/my_gpt/own.py").write_text(last)
        return committed(project)

    return change
