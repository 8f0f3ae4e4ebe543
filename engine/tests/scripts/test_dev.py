import ast
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "dev.py"
SCRIPTS = (SCRIPT, SCRIPT.with_name("environments.py"))

PYPROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "demo"
version = "1"

[dependency-groups]
dev = [{ include-group = "test" }, "demo[more]"]
test = ["demo[tests,types]"]
"""

# Installs the tree with a path file and logs a line per installation; fails if `broken` exists.
BACKEND = """\
import zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    with open("installed", "a") as log:
        log.write("once\\n")
    if Path("broken").exists():
        raise RuntimeError("the backend is broken")
    about = "Metadata-Version: 2.1\\nName: demo\\nVersion: 1\\n"
    about += "".join(f"Provides-Extra: {name}\\n" for name in ("more", "tests", "types"))
    with zipfile.ZipFile(f"{folder}/demo-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo.pth", str(Path("src").resolve()))
        wheel.writestr("demo-1.dist-info/METADATA", about)
        wheel.writestr("demo-1.dist-info/WHEEL", "Wheel-Version: 1.0\\n")
        wheel.writestr("demo-1.dist-info/RECORD", "")
    return "demo-1-py3-none-any.whl"
"""

COMMAND = """\
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd()}))
sys.exit(7 if sys.argv[1] == "fail" else 0)
"""

# Replaces ruff, mypy, and pytest: prints its call, fails if its name is in FAILING. If its name is
# in LASTING, it starts a process, prints both ids, and runs until a signal ends it.
TOOL = """\
import os, pathlib, subprocess, sys, time
name = pathlib.Path(__file__).stem
print(name, *sys.argv[1:], flush=True)
if name == os.environ.get("LASTING"):
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on')"
    words = [sys.executable, "-uc", f"{program}; time.sleep(600)"]
    stubborn = subprocess.Popen(words, stdout=subprocess.PIPE)
    stubborn.stdout.readline()
    print(os.getpid(), stubborn.pid, flush=True)
    time.sleep(600)
sys.exit(3 if name == os.environ.get("FAILING") else 0)
"""


def plant(root: Path) -> Path:
    package = root / "src" / "lockstep_gpt"
    package.mkdir(parents=True)
    (root / "scripts").mkdir()
    for script in SCRIPTS:
        shutil.copy(script, root / "scripts")
    (package / "__main__.py").write_text(COMMAND)
    for tool in ("ruff", "mypy", "pytest"):
        (root / "src" / f"{tool}.py").write_text(TOOL)
    (root / "backend.py").write_text(BACKEND)
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "constraints.txt").write_text("# no pins\n")
    return root


def start(root: Path, *arguments: str, cwd: Path | None = None, **extra: str) -> subprocess.Popen:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, str(root / "scripts" / "dev.py"), *arguments],
        cwd=cwd or root,
        env=inherited | extra,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def dev(root: Path, *arguments: str, **extra) -> tuple[int, str, str]:
    process = start(root, *arguments, **extra)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def installations(root: Path) -> int:
    log = root / "installed"
    return len(log.read_text().splitlines()) if log.exists() else 0


def kill_half_way(root: Path) -> None:
    killed = start(root, "train")
    while not (root / ".venv" / "bin" / "python").exists():
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()


@pytest.fixture(scope="module")
def set_up(tmp_path_factory):
    root = plant(tmp_path_factory.mktemp("with space") / "project")
    kill_half_way(root)
    calls = [start(root, "train") for _ in range(2)]
    ends = [(call.communicate(timeout=240), call.returncode) for call in calls]
    return root, ends, installations(root)


@pytest.fixture
def project(set_up):
    return set_up[0]


@pytest.mark.slow
def test_two_calls_at_once_repair_a_killed_install_only_once(set_up):
    _, ends, installed = set_up
    assert [status for _, status in ends] == [0, 0], ends
    assert installed == 1


def test_later_calls_install_and_print_nothing(project):
    before = installations(project)
    status, _, err = dev(project, "train")
    assert (status, err, installations(project)) == (0, "", before)


def test_a_command_gets_its_arguments_whole_and_keeps_its_folder(project, tmp_path):
    arguments = ["generate", "a run", "--prompt", 'def f("x", $y):\n']
    _, out, _ = dev(project, *arguments, cwd=tmp_path)
    assert json.loads(out) == {"arguments": arguments, "folder": str(tmp_path)}


def test_the_exit_status_is_the_command_s(project):
    assert dev(project, "fail")[0] == 7


@pytest.mark.slow
def test_the_tests_packages_are_installed_with_the_first_test(tmp_path, quick_venv):
    root = plant(tmp_path / "project")
    stamps = []
    for command in ("train", "test", "train", "test"):
        assert dev(root, command, **quick_venv)[0] == 0
        stamps.append((installations(root), (root / ".venv/set-up.sha256").read_text().split()[2:]))
    assert stamps == [(1, []), (2, ["+dev"]), (2, ["+dev"]), (2, ["+dev"])]


def optional(root: Path, *names: str) -> None:
    """Declare optional dependencies."""
    lines = [f"{name} = []\n" for name in names]
    with (root / "pyproject.toml").open("a") as file:
        file.writelines(["\n[project.optional-dependencies]\n", *lines])


def installed(root: Path) -> list[str]:
    """Return the optional dependencies in an environment, from its stamp."""
    return (root / ".venv/set-up.sha256").read_text().split()[2:]


def test_the_engine_s_tests_are_asked_for_in_vain_where_there_are_none(project):
    status, out, err = dev(project, "test", "--engine")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == (
        "dev.py: --engine: this project has no engine/tests; run them in the template's repository"
    )
    (project / "engine/tests").mkdir(parents=True)
    status, out, _ = dev(project, "test", "--engine")
    (project / "engine/tests").rmdir()
    (project / "engine").rmdir()
    expected = "pytest -n auto --durations=10 -m not slow"  # pyproject.toml names both folders
    assert (status, out.splitlines()[-1]) == (0, expected)


@pytest.mark.slow
def test_what_was_installed_by_name_stays_when_requirements_change(tmp_path, quick_venv):
    root = plant(tmp_path / "project")
    optional(root, "more", "types")
    for _ in range(2):
        assert dev(root, "install", "types", "more", **quick_venv)[0] == 0
        assert (installed(root), installations(root)) == (["more", "types"], 1)
    text = (root / "pyproject.toml").read_text()
    (root / "pyproject.toml").write_text(text.replace("types = []\n", ""))
    assert dev(root, "train", **quick_venv)[0] == 0
    assert (installed(root), installations(root)) == (["more"], 2)


@pytest.mark.slow
def test_python_s_own_variables_change_neither_the_environment_nor_the_command(
    tmp_path, quick_venv
):
    root = plant(tmp_path / "project")
    (root / "src/lockstep_gpt/__main__.py").write_text("import sys; print(sys.prefix)\n")
    variables = {"PYTHONHOME": sys.base_prefix, "PYTHONSAFEPATH": "1", "VIRTUAL_ENV": "/none"}
    status, out, err = dev(root, "train", **quick_venv, **variables)
    assert (status, out.strip()) == (0, str(root / ".venv")), err


def test_an_unknown_optional_dependency_is_rejected_in_one_line(project):
    before = installations(project)
    optional(project, "more", "types")
    status, _, err = dev(project, "install", "mroe")
    message = "dev.py: install: mroe is not an optional dependency; there are more, types\n"
    assert (status, err) == (2, message)
    assert installations(project) == before


def load(root: Path, monkeypatch):
    monkeypatch.syspath_prepend(root / "scripts")
    for name in ("dev", "environments"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("dev")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed_again(project, name):
    before = installations(project)
    with (project / name).open("a") as file:
        file.write("# changed\n")
    assert dev(project, "train")[0] == dev(project, "train")[0] == 0
    assert installations(project) == before + 1


def test_after_a_failed_update_the_old_environment_serves_the_old_needs(project):
    assert dev(project, "train")[0] == 0  # other tests may have changed what it needs
    needs = project / "constraints.txt"
    pins = needs.read_text()
    needs.write_text(pins + "# changed\n")
    (project / "broken").touch()
    status, _, err = dev(project, "train")
    assert status == 2
    assert "the backend is broken" in err
    assert err.splitlines()[-1] == "dev.py: pip failed, see above"  # it is not the network
    needs.write_text(pins)
    (project / "broken").unlink()
    before = installations(project)
    assert (dev(project, "train")[0], installations(project)) == (0, before)


@pytest.mark.slow
def test_test_runs_lint_types_and_tests_in_the_root(project, tmp_path):
    status, out, _ = dev(project, "test", "tests/model", "-k", "a or b", cwd=tmp_path)
    assert status == 0
    assert out.splitlines() == [
        "ruff check",
        "ruff format --check",
        "mypy",
        "pytest -n auto --durations=10 tests/model -k a or b",
    ]


def test_named_files_run_without_lint_and_types(project):
    (project / "tests").mkdir(exist_ok=True)
    (project / "tests/test_one.py").touch()
    for name in ("tests/test_one.py", "tests/test_one.py::test_it"):
        status, out, _ = dev(project, "test", name)
        assert (status, out) == (0, f"pytest -n auto --durations=10 {name}\n")


@pytest.mark.parametrize("words", [["--versions", "oldest"], ["--versions=oldest"]])
def test_other_versions_have_a_separate_environment_for_tests(project, words, quick_venv):
    before = (project / ".venv/set-up.sha256").read_bytes()
    status, out, err = dev(project, "test", "tests/model", *words, "-k", "a", **quick_venv)
    assert (status, out) == (0, "pytest -n auto --durations=10 tests/model -k a\n")
    assert f"dev.py: oldest versions: Python {platform.python_version()}\n" in err
    assert (project / ".venv-oldest/constraints.txt").read_text() == ""
    assert (project / ".venv/set-up.sha256").read_bytes() == before


def test_the_pinned_versions_are_printed_before_the_tests(project):
    errors = [
        dev(project, "test", "-k", "a", *words)[2] for words in ([], ["--versions", "pinned"])
    ]
    assert all(f"pinned versions: Python {platform.python_version()}\n" in err for err in errors)


def test_an_unknown_set_of_versions_is_rejected_in_one_line(project):
    status, _, err = dev(project, "test", "--versions", "latest")
    assert (status, err) == (2, "dev.py: --versions=latest is not one of oldest, pinned, newest\n")


def active(root: Path) -> dict[str, str]:
    """Return the variables of a Python that can run the tests of a planted project."""
    (root / "src/lockstep_gpt/__init__.py").touch()
    return {"PYTHONPATH": str(root / "src")}


def test_without_an_environment_tests_run_with_the_active_python(tmp_path):
    root = plant(tmp_path / "project")
    status, out, err = dev(root, "test", "-m", "gpu", **active(root))
    assert (status, out) == (0, "pytest --durations=10 -m gpu\n")
    assert f"dev.py: active versions: Python {platform.python_version()}\n" in err
    assert not (root / ".venv").exists()
    status, out, _ = dev(root, "test", "--all", **active(root))
    assert (status, out) == (0, "pytest -n auto --durations=10\n")


@pytest.mark.slow
@pytest.mark.parametrize("why", ["another checkout", "no plugin of pytest", "--versions"])
def test_the_active_python_is_not_used(tmp_path, quick_venv, why):
    root = plant(tmp_path / "project")
    other = plant(tmp_path / "other")
    environment = active(other if why == "another checkout" else root)
    words = ["--versions", "pinned"] if why == "--versions" else []
    if why == "no plugin of pytest":  # `None` in sys.modules: it cannot be found
        absent = "import sys\nsys.modules['xdist'] = None\n"
        (root / "src/sitecustomize.py").write_text(absent)
    path = ":".join([environment["PYTHONPATH"], *quick_venv.values()])
    assert dev(root, "test", "-m", "gpu", *words, PYTHONPATH=path)[0] == 0
    assert installed(root) == ["+dev"]


def has_networks() -> bool:
    """Return whether this user can make a network namespace."""
    unshare = shutil.which("unshare")
    return bool(unshare) and subprocess.call([unshare, "-n", "true"], stderr=-3) == 0


@pytest.mark.skipif(not has_networks(), reason="this user cannot make a network namespace")
@pytest.mark.parametrize("has_environment", [False, True], ids=["active Python", ".venv"])
def test_tests_for_gpus_run_without_a_network(project, tmp_path, has_environment):
    root, environment = project, {}
    if has_environment:
        assert dev(root, "test", "-k", "one")[0] == 0  # installs what tests need
    else:
        root = plant(tmp_path / "project")
        environment = active(root)
    words = ["unshare", "-n", sys.executable, "scripts/dev.py", "test", "-m", "gpu"]
    done = subprocess.run(
        words, cwd=root, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "pytest --durations=10 -m gpu")
    assert "setting up" not in done.stderr


@pytest.mark.parametrize("options", [["-n", "3"], ["-n0"], ["--pdb"]])
def test_test_leaves_the_number_of_processes_to_who_chose_it(project, options):
    _, out, _ = dev(project, "test", "--all", *options)
    assert out.splitlines()[-1] == " ".join(["pytest", "--durations=10", *options])


@pytest.mark.parametrize(
    ("options", "left_out"),
    [([], True), (["-x"], True), (["-n", "3"], True), (["--all"], False), (["-k", "a"], False)],
)
def test_slow_tests_run_if_all_or_chosen_tests_do(project, options, left_out):
    _, out, _ = dev(project, "test", *options)
    assert ("-m not slow" in out) == left_out
    assert "--all" not in out
    (project / "tests/model").mkdir(parents=True, exist_ok=True)
    assert "not slow" not in dev(project, "test", "tests/model", *options)[1]


def test_a_file_that_does_not_exist_is_named_at_once(project):
    status, out, err = dev(project, "test", "tests/nothing.py::test_it")
    assert (status, out) == (2, "")
    assert err.endswith("dev.py: tests/nothing.py does not exist\n")


@pytest.mark.slow
def test_all_tests_are_announced_with_the_time_they_took_before(project):
    for file in (project / ".venv").glob("test-seconds*"):  # of other tests of this file
        file.unlink()
    (project / "tests").mkdir(exist_ok=True)
    (project / "tests/test_many.py").write_text("\ndef test_it(): pass\n" * 3000)
    guessed = dev(project, "test", "--all")[2]
    minutes = 1 + round(3000 * 0.3 * 2 / os.cpu_count() / 60)  # one for lint and types
    assert f"lint, types and all tests: about {minutes} minutes\n" in guessed
    took = project / ".venv/test-seconds-all"
    assert 0 < float(took.read_text()) < 300
    took.write_text("125.0")
    assert "all tests: about 2 minutes\n" in dev(project, "test", "--all")[2]
    minutes = 1 + round(3000 * 0.1 * 2 / os.cpu_count() / 60)
    expected = f"lint, types and fast tests: about {minutes} minutes; all tests: --all\n"
    assert expected in dev(project, "test")[2]  # the time of all tests says nothing about them
    assert " tests: about" not in dev(project, "test", "-k", "one")[2]


PROJECT, OURS = "tests", "engine/tests"
CHANGES = {
    "src/lockstep_gpt/gpt.py": {f"{PROJECT}/test_gpt.py", f"{OURS}/project/test_gpt.py"},  # mirrors
    "src/lockstep_gpt/shape.py": {f"{OURS}/project/test_shape.py"},
    "src/lockstep_gpt/optim.py": {f"{PROJECT}/test_gpt.py"},  # any importer
    "engine/src/lockstep/__init__.py": {f"{OURS}/test_lockstep.py"},
    "engine/src/lockstep/run/lock.py": {f"{OURS}/run/test_lock.py"},
    "engine/src/lockstep/launch/agent.py": {f"{OURS}/test_who.py"},
    "engine/src/hydra_plugins/search.py": {f"{OURS}/hydra_plugins/test_search.py"},
    f"{OURS}/run/test_lock.py": {f"{OURS}/run/test_lock.py"},
    f"{OURS}/run/conftest.py": {f"{OURS}/run"},
    f"{PROJECT}/test_gpt.py": {f"{PROJECT}/test_gpt.py"},
    "docs/page.md": {f"{OURS}/docs/test_pages.py", "-k", "not of_a_page or docs/page.md"},
    "engine/README.md": {f"{OURS}/docs/test_pages.py", "-k", "not of_a_page or engine/README.md"},
    "scripts/job.sh": {f"{OURS}/scripts/test_jobs.py"},  # names it
    "scripts/other.sh": {f"{OURS}/scripts"},  # any may use it
    "README.md": {f"{OURS}/docs/test_pages.py", "-k", "not of_a_page or README.md"},
    "configs/run/tiny.yaml": {
        f"{OURS}/run/test_lock.py",
        f"{OURS}/launch/test_compose.py",
        f"{PROJECT}/test_configs.py",
    },
    "configs/trainer/tpu.yaml": {f"{OURS}/launch/test_compose.py", f"{PROJECT}/test_configs.py"},
    "LICENSE": set(),
}


@pytest.mark.parametrize(("changed", "tests"), CHANGES.items())
def test_changed_runs_the_tests_of_files_changed_since_the_last_commit(
    tmp_path, monkeypatch, changed, tests
):
    root = plant(tmp_path / "project")
    for name in CHANGES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for name, text in {
        ".gitignore": "__pycache__/\n",
        f"{PROJECT}/test_gpt.py": "from lockstep_gpt.optim import adamw\n",
        f"{PROJECT}/test_configs.py": "",
        f"{OURS}/project/test_gpt.py": "",
        f"{OURS}/project/test_shape.py": "",
        f"{OURS}/test_who.py": "from lockstep.launch import agent\n",
        f"{OURS}/launch/test_compose.py": "",
        f"{OURS}/hydra_plugins/test_search.py": "",
        f"{OURS}/test_lockstep.py": "",
        f"{OURS}/run/test_lock.py": 'PRESET = Path("configs/run/tiny.yaml")\n',
        f"{OURS}/docs/test_pages.py": 'PAGES = Path("docs").glob("*.md")\n',
        f"{OURS}/docs/test_other.py": 'PAGE = Path("docs/other.md")\n',
        f"{OURS}/scripts/test_jobs.py": 'JOB = Path("scripts/job.sh")\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=root, check=True)
    (root / changed).write_text("changed\n")
    assert set(load(root, monkeypatch).changed_tests()) == tests


@pytest.mark.parametrize(
    ("failing", "report"),
    [
        ("none", "lint passed, types passed, tests passed"),
        ("ruff", "lint failed, types passed, tests passed"),
        ("mypy", "lint passed, types failed, tests passed"),
        ("pytest", "lint passed, types passed, tests failed"),
    ],
)
def test_all_checks_run_and_are_reported_whichever_fails(project, failing, report):
    status, out, err = dev(project, "test", FAILING=failing)
    assert out.splitlines()[-1].startswith("pytest")
    assert err.splitlines()[-1] == f"dev.py: {report}"
    assert status == int(failing != "none")


def test_lint_runs_lint_and_types_and_no_tests(project):
    status, out, err = dev(project, "lint", FAILING="mypy")
    assert (status, out.splitlines()) == (1, ["ruff check", "ruff format --check", "mypy"])
    assert err.splitlines()[-1] == "dev.py: lint passed, types failed"
    assert dev(project, "lint", "src")[0] == 2


@pytest.mark.slow
def test_format_fixes_what_lint_finds(project):
    _, _, err = dev(project, "lint", FAILING="ruff")
    assert "`python3 scripts/dev.py format` fixes most" in err.splitlines()[-2]
    status, out, _ = dev(project, "format")
    assert (status, out.splitlines()) == (0, ["ruff check --fix", "ruff format"])
    assert dev(project, "format", FAILING="ruff")[0] == 1
    assert dev(project, "format", "src")[0] == 2
    assert dev(project, "format", "--help")[0] == 0


def test_the_help_of_test_explains_changed_and_that_pytest_gets_the_rest(tmp_path):
    root = plant(tmp_path / "project")
    status, said, _ = dev(root, "test", "--help")
    assert status == 0
    assert "differ from the last commit" in said
    assert "all other words go to pytest" in said
    assert not (root / ".venv").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_to_the_parent_ends_all_tests(project, wait_for, signum, status):
    process = start(project, "test", LASTING="pytest")
    lines = iter(process.stdout.readline, "")
    ids = next(line for line in lines if line[0].isdigit()).split()
    os.kill(process.pid, signum)
    process.communicate(timeout=240)
    assert process.returncode == status
    wait_for(lambda: not any(Path("/proc", pid).exists() for pid in ids), 60)


def test_without_a_command_it_shows_its_usage(tmp_path):
    root = plant(tmp_path / "project")
    status, _, usage = dev(root)
    assert (status, dev(root, "--help")[:2]) == (2, (0, usage))
    assert "python3 scripts/dev.py COMMAND" in usage
    assert not (root / ".venv").exists()


@pytest.mark.parametrize(
    ("command", "option"), [("test", "--changed"), ("test", "--versions"), ("install", "NAMES")]
)
def test_a_command_s_help_shows_its_own_options_without_an_environment(tmp_path, command, option):
    root = plant(tmp_path / "project")
    status, out, _ = dev(root, command, "--help")
    assert status == 0
    assert option in out
    assert not (root / ".venv").exists()


def test_a_python_without_venv_names_the_missing_package(tmp_path):
    root = plant(tmp_path / "project")
    (tmp_path / "venv.py").write_text("raise ImportError('taken out')")
    status, _, err = dev(root, "train", PYTHONPATH=str(tmp_path))
    assert status == 2
    assert "apt install python3-venv" in err.splitlines()[-1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_python_since_3_7_can_parse_it(script):
    ast.parse(script.read_text(), feature_version=(3, 7))


def old_python() -> str | None:
    """An interpreter older than the supported versions, on PATH or in pyenv's folder."""
    names = [f"python3.{minor}" for minor in range(6, 11)]
    versions = (Path.home() / ".pyenv" / "versions").glob("3.*/bin/python3.*")
    paths = [shutil.which(name) for name in names] + [str(p) for p in versions if p.name in names]
    for path in filter(None, paths):  # a pyenv shim may exist there but not run
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


@pytest.mark.slow
def test_an_unsupported_python_is_named_in_one_line():
    if not (python := old_python()):
        pytest.skip("no Python before 3.11 on this machine")
    done = subprocess.run([python, str(SCRIPT), "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "needs Python 3.11 to 3.14, not 3." in done.stderr
