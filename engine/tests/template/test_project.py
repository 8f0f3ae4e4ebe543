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

LIMIT = 40 * 60  # seconds, for each step: all tests of a project take twenty minutes of two cores
# Among a project's tests, most of which train.
FAST = "test_schedule.py or test_generate.py or test_gpt.py or test_modern.py or test_order.py"
MANY = 1000  # tests of a project with the default answers
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


def required(
    project: str, needs: Callable[[str], list[str]], extra: str
) -> list[metadata.Distribution]:
    """Return the distributions that an extra of a project installs, as far as they are here.

    Args:
        project: the project's name.
        needs: returns the requirements of an extra.
        extra: "" for none.
    """
    waiting = [(project, extra)]
    seen, installed = set(waiting), {}
    while waiting:
        name, extra = waiting.pop()
        if name == project:
            needed = needs(extra)
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
    """Give a project a complete `.venv`, with its requirements from this environment."""

    def borrow(project: Path) -> Path:
        run(project, sys.executable, "-m", "venv", "--without-pip", ".venv")
        text = (project / "pyproject.toml").read_text("utf-8")
        about, groups = (tomllib.loads(text)[name] for name in ("project", "dependency-groups"))
        assert groups["dev"] == [{"include-group": "test"}, {"include-group": "lint"}]
        extras = about["optional-dependencies"] | {"dev": [*groups["test"], *groups["lint"]]}

        def needs(extra: str) -> list[str]:
            return [*about["dependencies"], *extras.get(extra, [])]

        pip = metadata.distributions(name="pip")  # as in a virtual environment that has its own
        link([*required(about["name"], needs, "dev"), *pip], project / ".venv")
        tools = project / ".venv/bin"
        for tool in Path(sysconfig.get_path("scripts")).iterdir():
            if not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
        run(project, *PIP, ".venv/bin/python", "install", "-q", "--no-deps", "-e", ".")
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
        borrowing(folder / "my-gpt")
        dev = [sys.executable, "scripts/dev.py", "train", "--cfg", "job"]
        assert "max_steps:" in run(folder / "my-gpt", *dev)

    return once(projects / "installed", make) / "my-gpt"


@pytest.fixture
def packed(projects, once, project, run):
    """The folder of its wheel and its sdist."""
    python = project / ".venv/bin/python"
    words = ["-m", "hatchling", "build", "-d"]
    return once(projects / "packed", lambda folder: run(project, python, *words, folder))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("extras", ["pages"])
def test_it_passes_its_own_tests_and_leaves_nothing_for_git(
    extras, generate, borrowing, run, git, tmp_path, tmp_path_factory, types, monkeypatch, request
):
    """Without `--whole-projects`, only lint, types, and fast tests: all take minutes, as ours."""
    all_tests = request.config.getoption("--whole-projects", default=False)
    options = ["--all", "-n", "auto"] if all_tests else ["-n0", "-k", FAST]  # next to other tests
    # Not the cache of other tests: this environment lacks libraries of extras, so mypy would read
    # torch again for each of the two.
    monkeypatch.setenv("MYPY_CACHE_DIR", str(types(extras)))
    generate(tmp_path, f"extras={extras}")
    project = borrowing(tmp_path / "my-gpt")
    # pytest would otherwise delete files of earlier sessions now, which slows down all other tests.
    files = f"--basetemp={tmp_path_factory.mktemp('own')}"
    out = run(project, sys.executable, "scripts/dev.py", "test", *options, files)
    counts = re.findall(r"(\d+) (?:passed|deselected)", out)
    assert sum(map(int, counts)) > MANY
    assert git(project, "status", "--porcelain") == ""


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
def test_from_the_wheel_alone_it_trains_in_an_empty_folder(packed, run, tmp_path):
    (tmp_path / "empty").mkdir()
    (wheel,) = packed.glob("*.whl")
    about = metadata.PathDistribution(zipfile.Path(wheel, "my_gpt-0.1.0.dist-info/"))
    run(tmp_path, sys.executable, "-m", "venv", "--without-pip", "fresh")
    # Links to the packages that its metadata requires. pip may download others, but may not replace
    # these: it would write to this environment.
    linked = required("my-gpt", lambda _: about.requires or [], "")
    link(linked, tmp_path / "fresh")
    versions = (f"{distribution.name}=={distribution.version}\n" for distribution in linked)
    (tmp_path / "versions.txt").write_text("".join(versions))
    pip = [*PIP, "fresh/bin/python", "install", "-q", "--no-compile"]  # the imported ones are
    run(tmp_path, *pip, "-c", "versions.txt", wheel)
    command = tmp_path / "fresh/bin/my-gpt"
    words = ["train", "experiment=smoke", "logger=none", "callbacks.sample.length=9"]
    out = run(tmp_path / "empty", command, *words)
    assert "step 20/20  val_loss" in out
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"data", "runs"}
