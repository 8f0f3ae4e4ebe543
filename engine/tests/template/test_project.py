"""Real projects pass their own tests, train on two ranks, and can be packaged and installed."""

import contextlib
import ctypes
import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LIMIT = 20 * 60  # seconds, for each step: most of it is for an installation with a slow network
ENGINE = "lightning-lockstep"
ANSWERS = ("wandb_project=its-wandb", "wandb_entity=its-team")


def die_with_parent() -> None:
    """Have Linux kill this process when the tests are killed; otherwise, it would keep running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


@pytest.fixture
def run(environment):
    """Run a command to its end, check its status, and return its output."""

    def to_the_end(cwd: Path, *words: str | Path) -> str:
        done = subprocess.run(
            [*map(str, words)],
            cwd=cwd,
            # tests/conftest.py reads the first; threads of tiny tensors wait for other tests'.
            env=environment(ENDS_WITH_PARENT="1", OMP_NUM_THREADS="1"),
            preexec_fn=die_with_parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return to_the_end


Needs = dict[str, Callable[[str], list[str]]]


def of_source(folder: Path) -> Callable[[str], list[str]]:
    """Return a function that returns what a source tree needs, with an optional dependency."""
    about = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    groups = about.get("dependency-groups", {})
    optional = about["project"]["optional-dependencies"]
    if groups:
        assert groups["dev"] == [{"include-group": "test"}, {"include-group": "lint"}]
        optional = optional | {"dev": [*groups["test"], *groups["lint"]]}

    def needs(extra: str) -> list[str]:
        return [*about["project"]["dependencies"], *optional.get(extra, [])]

    return needs


def of_wheel(wheel: Path) -> Callable[[str], list[str]]:
    """Return a function that returns what a wheel needs."""
    name, version = wheel.name.split("-")[:2]
    about = metadata.PathDistribution(zipfile.Path(wheel, f"{name}-{version}.dist-info/"))
    return lambda _: about.requires or []


def required(needs: Needs, project: str, extra: str) -> list[metadata.Distribution]:
    """Return the distributions of others that a project installs, as far as they are here.

    Args:
        needs: for the names of ours, functions that return the requirements with an extra.
        project: the project's name.
        extra: "" for none.
    """
    waiting = [(project, extra)]
    seen, installed = set(waiting), {}
    while waiting:
        name, extra = waiting.pop()
        if name in needs:
            needed = needs[name](extra)
        else:
            with contextlib.suppress(metadata.PackageNotFoundError):  # it is for other machines
                installed[name] = metadata.distribution(name)
            needed = (installed[name].requires or []) if name in installed else []
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                new = {
                    (canonicalize_name(requirement.name), wanted)
                    for wanted in ("", *requirement.extras)
                }
                waiting += new - seen
                seen |= new
    return [*installed.values()]


def link(distributions: list[metadata.Distribution], folder: Path) -> None:
    """Give the virtual environment in `folder` exactly the packages of `distributions`."""
    tops = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for distribution in distributions:
        names = {path.parts[0] for path in distribution.files or []}
        for name in names - {"..", "__pycache__"}:
            if not (tops / name).exists():
                (tops / name).symlink_to(distribution.locate_file(name))


PIP = [sys.executable, "-m", "pip", "--python"]


@pytest.fixture
def borrowing(run):
    """Give a project a complete `.venv`, with its requirements from this environment.

    Its engine is installed from its source, or else from what `options` of pip name, without a
    network.
    """

    def borrow(project: Path, engine: Callable[[str], list[str]], *options: str | Path) -> Path:
        run(project, sys.executable, "-m", "venv", "--without-pip", ".venv")
        pip = metadata.distributions(name="pip")  # as in a virtual environment that has its own
        needs = {"my-gpt": of_source(project), ENGINE: engine}
        link([*required(needs, "my-gpt", "dev"), *pip], project / ".venv")
        tools = project / ".venv/bin"
        for tool in Path(sysconfig.get_path("scripts")).iterdir():
            if not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
        install = [*PIP, ".venv/bin/python", "install", "-q", "--no-index", "--no-build-isolation"]
        run(project, *install, *options, "-e", ".")
        stamp = (
            "from environments import Environment; here = Environment();"
            "here.stamp.write_text(' '.join(here._wanted(True, ())))"
        )
        run(project / "scripts", sys.executable, "-c", stamp)
        shutil.rmtree(project / "scripts/__pycache__", ignore_errors=True)
        return project

    return borrow


@pytest.fixture
def project(projects, once, generate, borrowing, run):
    """A project with its environment."""

    def make(folder: Path) -> None:
        generate(folder, *ANSWERS)
        project = folder / "my-gpt"
        borrowing(project, of_source(project / "engine"), "-e", "engine")
        dev = [sys.executable, "scripts/dev.py", "train", "--cfg", "job"]
        assert "max_steps:" in run(project, *dev)

    return once(projects / "installed", make) / "my-gpt"


@pytest.fixture
def packed(projects, once, project, run):
    """The folder of its wheel and its sdist, and of the engine's wheel."""

    def make(folder: Path) -> None:
        build = [project / ".venv/bin/python", "-m", "hatchling", "build", "-d", folder]
        run(project, *build)
        run(project / "engine", *build, "-t", "wheel")

    return once(projects / "packed", make)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT + 60)
def test_it_passes_its_own_tests_and_leaves_nothing_for_git(
    zipped, generate, borrowing, run, git, tmp_path, types, monkeypatch, request
):
    """With `--whole-projects`, its environment is one that pip makes, and all tests run."""
    monkeypatch.setenv("MYPY_CACHE_DIR", str(types("own_tests")))
    generate.of(zipped)(tmp_path)
    project = tmp_path / "my-gpt"
    options = ["--all"]
    if not request.config.getoption("--whole-projects", default=False):
        borrowing(project, of_source(project / "engine"), "-e", "engine")
        options = ["-n0"]  # next to other tests
    # pytest would otherwise delete files of earlier sessions now, which slows down all other tests.
    out = run(
        project, sys.executable, "scripts/dev.py", "test", *options, f"--basetemp={tmp_path}/t"
    )
    assert "lint passed, types passed, tests passed" in out
    assert re.search(r"\d+ passed", out)
    assert not re.search(r"\d+ skipped", out), out
    assert git(project, "status", "--porcelain") == ""


# What stands for the engine's source in the project's dependencies.
RELEASES = {
    "a wheel": "lightning-lockstep[tokens,wandb] @ file://{wheel}",
    "a version": "lightning-lockstep[tokens,wandb]=={version}",
}


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_with_a_release_of_the_engine_instead_of_its_source_it_trains(
    release, packed, generate, borrowing, run, tmp_path
):
    generate(tmp_path)
    project = tmp_path / "my-gpt"
    shutil.rmtree(project / "engine")
    (wheel,) = packed.glob("lightning_lockstep-*.whl")
    line = RELEASES[release].format(wheel=wheel, version=wheel.name.split("-")[1])
    about = (project / "pyproject.toml").read_text("utf-8")
    (old,) = re.findall(r'^    "(lightning-lockstep\[tokens,wandb\])", #', about, re.MULTILINE)
    (project / "pyproject.toml").write_text(about.replace(f'"{old}"', f'"{line}"'), "utf-8")
    options = ["--find-links", packed] if release == "a version" else []
    borrowing(project, of_wheel(wheel), *options)
    program = "import lockstep; print(lockstep.__file__)"
    place = run(project, ".venv/bin/python", "-c", program)
    assert place.startswith(str(project / ".venv/lib"))
    words = ["train", "experiment=smoke", "logger=none", "max_steps=4", "val_every=4"]
    out = run(project, sys.executable, "scripts/dev.py", *words)
    assert "step 4/4  val_loss" in out


@pytest.mark.slow
def test_two_ranks_train_into_one_run_directory_with_one_wandb_run(project, run, git):
    ranks = ["trainer=cpu", "trainer.devices=2", "strategy=ddp"]
    backend = "strategy.process_group_backend=gloo"
    words = [*ranks, backend, "callbacks.sample.length=9"]
    run(project, ".venv/bin/my-gpt", "train", "experiment=smoke", *words)
    (folder,) = (project / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["world_size"]) == ("done", 20, 2)
    (log,) = project.glob("**/offline-run-*/*.wandb")
    assert log.is_relative_to(folder)
    from wandb.proto.wandb_internal_pb2 import RunRecord  # `-m gpu` works without wandb

    for record in (RunRecord(project="its-wandb"), RunRecord(entity="its-team")):
        assert record.SerializeToString() in log.read_bytes()
    assert git(project, "status", "--porcelain") == ""


def test_its_wheel_and_sdist_contain_its_configs(project, packed):
    configs = {path.relative_to(project).as_posix() for path in project.glob("configs/**/*.yaml")}
    assert "configs/train.yaml" in configs
    with zipfile.ZipFile(next(packed.glob("my_gpt-*.whl"))) as wheel:
        assert {f"my_gpt/{name}" for name in configs} <= set(wheel.namelist())
    with tarfile.open(next(packed.glob("my_gpt-*.tar.gz"))) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert configs <= names


@pytest.mark.slow
def test_from_the_wheels_alone_it_trains_in_an_empty_folder(packed, run, tmp_path):
    (tmp_path / "empty").mkdir()
    wheels = {
        "my-gpt": next(packed.glob("my_gpt-*.whl")),
        ENGINE: next(packed.glob("lightning_lockstep-*.whl")),
    }
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", "fresh")
    needs = {name: of_wheel(wheel) for name, wheel in wheels.items()}
    link(required(needs, "my-gpt", ""), tmp_path / "fresh")
    pip = [*PIP, "fresh/bin/python", "install", "-q", "--no-index", "--no-compile"]
    run(tmp_path, *pip, *wheels.values())
    command = tmp_path / "fresh/bin/my-gpt"
    words = ["train", "experiment=smoke", "logger=none", "callbacks.sample.length=9"]
    out = run(tmp_path / "empty", command, *words)
    assert "step 20/20  val_loss" in out
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"data", "runs"}
