#!/usr/bin/env python3
"""Set up .venv if it is missing or out of date, then run a command of the project.

usage: python3 scripts/dev.py COMMAND [arguments]
  train [overrides]       train; prepare, generate, and all other commands work the same way
  test [pytest options]   run lint, types, and the fast tests, even if one of them fails; the first
                          time, this installs what the tests need, too
  test --all              the same with all tests
  test --changed          the same with all tests of files that differ from the last commit
  test --versions SET     the tests with the oldest, the pinned, or the newest versions of what
                          the project needs; each set has its own environment
  lint                    only lint and types
  format                  fix what lint can fix by itself, such as spaces and the order of imports
  install [NAMES]         install optional dependencies of pyproject.toml, and keep them installed
  pins                    copy the pins of constraints.txt into pyproject.toml, where uv reads them
  update [TEMPLATE]       apply a later state of the template; see update --help
"""
# Python 3.6 must still be able to start this, so that an unsupported Python gets a clear message.

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
from environments import (
    PINS,
    POSIX,
    ROOT,
    SETS,
    Environment,
    optional_dependencies,
    refuse,
    say,
    with_pins,
)

TEST_HELP = """\
usage: python3 scripts/dev.py test [--all | --changed] [--engine] [--versions SET] [pytest options]
       python3 scripts/dev.py lint

Run lint, types, and tests, even if one of them fails; the last line says which did, and the exit
status is then 1. Without options, run the fast tests: all but those marked slow. Tests that you
choose, by path, -k, or -m, run in any case; files of tests run without lint and types. `lint` runs
only lint and types.

  --all                   all tests, before you release or deploy
  --changed               all tests of files that differ from the last commit, new files included:
                          of src/NAME/gpt.py, for example, tests/test_gpt.py
  --engine                the engine's tests, too; they are in the repository of the template, where
                          each `test` includes them, and not in projects
  --versions SET          oldest, pinned (the default), or newest versions of what the project
                          needs; each set has its own environment; lint and types only with pinned

Without --versions and .venv, tests run with the Python that runs this, if it can import the project
and pytest's plugins. Nothing is installed then, as on a GPU machine without a network.

  pytest options          all other words go to pytest: paths of tests, -k WORDS, -x, -n PROCESSES,
                          and so on; it lists them with .venv/bin/python -m pytest --help
"""
INSTALL_HELP = """\
usage: python3 scripts/dev.py install [NAMES]

Install optional dependencies of pyproject.toml in .venv, and keep them installed. Without NAMES,
only install what the project needs, as every command of dev.py does.

"""

# Options of pytest that exclude our -n, among them `-m gpu`, because tests would share the GPUs.
OWN_PROCESSES = ("-n", "--pdb", "--trace", "gpu")
CHOOSING = ("-k", "-m", "--lf", "--last-failed")
FAST = ["-m", "not slow"]
SECONDS = "test-seconds"  # the time of all tests, or all fast ones, when they last passed
# Seconds of all processes, divided by the number of test functions, if they have never passed.
PER_TEST = {"all": 0.3, "fast": 0.1}
OTHERS = 60.0  # seconds that lint, types, and the first runs take
LINT = {"lint": [["ruff", "check"], ["ruff", "format", "--check"]], "types": [["mypy"]]}
FORMAT = (["-m", "ruff", "check", "--fix"], ["-m", "ruff", "format"])
# Folders of tests; the second one is only in the repository of the template.
TESTS = ("tests", "engine/tests")
# How the path of a source begins, and which trees of tests mirror what is below.
MIRRORS = (
    (r"engine/src/lockstep/", ("engine/tests",)),
    (r"engine/src/", ("engine/tests",)),
    (r"src/\w+/", ("tests", "engine/tests/project")),
    (r"configs/", TESTS),
    (r"", TESTS),
)
# Tests of all choices, besides those that name one.
OF_CONFIGS = ("tests/test_configs.py", "engine/tests/launch/test_compose.py")


def main(arguments: "list[str]") -> int:
    """Run the command in `arguments`."""
    if not arguments:
        sys.stderr.write(str(__doc__))
        return 2
    if arguments[0] in ("-h", "--help"):
        sys.stdout.write(str(__doc__))
        return 0
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        refuse(f"needs Python 3.11 to 3.14, not {sys.version[:6]}; try python3.12 scripts/dev.py")
    os.environ.pop("PYTHONHOME", None)  # of the Python that runs this, not of the environment's
    if arguments[0] == "update" and (ROOT / "scripts/update.py").is_file():
        import update

        return update.main(arguments[1:], ROOT)
    own = {
        "install": install,
        "pins": pins,
        "test": test,
        "lint": lint,
        "format": lambda options: _run_each(FORMAT, options, everything=True),
    }
    if arguments[0] in own:
        return own[arguments[0]](arguments[1:])
    environment = Environment()
    environment.set_up()
    command = [environment.python, "-m", "lockstep_gpt", *arguments]
    if POSIX:
        os.execv(command[0], command)
    return subprocess.call(command)


def _run_each(
    steps: "tuple[list[str], ...]", options: "list[str]", everything: bool = False
) -> int:
    """Run Python with the words of each step; return 1 if one failed.

    Args:
        steps: the words of each.
        options: refused, but for a wish for help.
        everything: install what the tests need, too.
    """
    if options:
        sys.stdout.write(str(__doc__))
        return 0 if options[0] in ("-h", "--help") else 2
    environment = Environment()
    environment.set_up(everything=everything)
    statuses = [subprocess.call([environment.python, *step], cwd=ROOT) for step in steps]
    return int(any(statuses))


def test(options: "list[str]") -> int:
    """Run all checks, or those that the options choose, with the versions that they name."""
    if "-h" in options or "--help" in options:
        sys.stdout.write(TEST_HELP)
        return 0
    environment, options = _with_versions(options)
    return check(environment, options)


def lint(options: "list[str]") -> int:
    """Run lint and types."""
    if options:
        sys.stdout.write(TEST_HELP)
        return 0 if options[0] in ("-h", "--help") else 2
    environment = Environment()
    environment.set_up(everything=True)
    return run_checks(environment, LINT)


def install(names: "list[str]") -> int:
    """Install the project with these optional dependencies."""
    known = optional_dependencies()
    if "-h" in names or "--help" in names:
        sys.stdout.write(f"{INSTALL_HELP}NAMES: {' '.join(known)}\n")
        return 0
    for name in names:
        if name not in known:
            refuse(f"install: {name} is not an optional dependency; there are {', '.join(known)}")
    Environment().set_up(names=tuple(names))
    return 0


def pins(options: "list[str]") -> int:
    """Copy the pins of constraints.txt into pyproject.toml."""
    if options:
        sys.stdout.write(str(__doc__))
        return 0 if options[0] in ("-h", "--help") else 2
    project = ROOT / "pyproject.toml"
    project.write_text(with_pins(project.read_text("utf-8"), PINS.read_text("utf-8")), "utf-8")
    return 0


def _with_versions(options: "list[str]") -> "tuple[Environment, list[str]]":
    """Return the environment for the tests, which `--versions` can choose, and other options."""
    parser = argparse.ArgumentParser("dev.py test", add_help=False, allow_abbrev=False)
    parser.add_argument("--versions")
    known, others = parser.parse_known_args(options)
    if known.versions not in (None, *SETS):
        refuse(f"--versions={known.versions} is not one of {', '.join(SETS)}")
    environment = Environment(known.versions or "pinned")
    if known.versions or not environment.use_active():
        environment.set_up(everything=True)
    return environment, others


def check(environment: Environment, options: "list[str]") -> int:
    """Run lint, types (both with the pins only), and tests; of named files, only the tests."""
    names_files = any((ROOT / option.partition("::")[0]).is_file() for option in options)
    chosen = _chosen_tests(options)
    spread = [] if any(option.startswith(OWN_PROCESSES) for option in options) else ["-n", "auto"]
    pinned = environment.versions == "pinned"
    checks = {}
    if pinned and not names_files:
        checks.update(LINT)
    if chosen is not None:
        checks["tests"] = [["pytest", *spread, "--durations=10", *chosen]]
    say(f"{environment.versions} versions: {environment.describe()}")
    is_whole = chosen in ([], FAST)
    kind = "fast" if chosen == FAST else "all"
    seconds = environment.folder / f"{SECONDS}-{kind}"
    if is_whole:
        before = "lint, types and " if pinned else ""
        after = "; all tests: --all" if kind == "fast" else ""
        minutes = max(1, round(_estimate(seconds, kind) / 60))
        about = "a minute" if minutes == 1 else f"{minutes} minutes"
        say(f"{before}{kind} tests: about {about}{after}")
    started = time.monotonic()
    status = run_checks(environment, checks)
    if is_whole and not status and environment.versions in SETS:  # not into a folder of the system
        seconds.write_text(str(time.monotonic() - started))
    return status


def _chosen_tests(options: "list[str]") -> "list[str] | None":
    """Return pytest's options for the tests to run; None if no test is to run."""
    others = [option for option in options if option not in ("--all", "--changed", "--engine")]
    if "--engine" in options and not (ROOT / TESTS[1]).is_dir():
        refuse("--engine: this project has no engine/tests; run them in the template's repository")
    if "--changed" in options:
        files = changed_tests()
        say(f"of what has changed: {' '.join(files) or 'no tests, only lint and types'}")
        return files + others if files else None
    paths = [option.partition("::")[0] for option in others if not option.startswith("-")]
    for path in paths:
        if "/" in path and path.endswith(".py") and not (ROOT / path).exists():
            refuse(f"{path} does not exist")
    chooses = any(option.startswith(CHOOSING) for option in others)
    if "--all" in options or chooses or any((ROOT / path).exists() for path in paths):
        return others
    return FAST + others


def run_checks(environment: Environment, checks: "dict[str, list[list[str]]]") -> int:
    """Run all steps of all checks, and report each check; return 1 if one failed.

    After a signal, end at once, and return 128 + its number.
    """
    results = {}
    for name, steps in checks.items():
        results[name] = "passed"
        for step in steps:
            say(" ".join(step))
            status = _to_the_end([environment.python, "-m", *step])
            if status > 128:
                return status
            if status:
                results[name] = "failed"
    if results.get("lint") == "failed":
        say("`python3 scripts/dev.py format` fixes most of what lint finds")
    say(", ".join(f"{name} {result}" for name, result in results.items()))
    return int("failed" in results.values())


def _to_the_end(words: "list[str]") -> int:
    """Run a step. Signals to this process reach all of its processes, and none outlives it."""
    step = subprocess.Popen(words, cwd=ROOT, start_new_session=POSIX)
    received = []

    def pass_on(number: int, _frame: object) -> None:
        received.append(number)
        os.killpg(step.pid, number)

    if POSIX:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, pass_on)
    status = step.wait()
    with contextlib.suppress(AttributeError, ProcessLookupError):  # no groups; none is left
        os.killpg(step.pid, signal.SIGKILL)
    if received:  # pytest would return 2
        return 128 + received[0]
    return 128 - status if status < 0 else status


def _estimate(seconds: Path, kind: str) -> float:
    """Return the seconds that the tests of a kind took here the last time, or an estimate."""
    if seconds.is_file():
        return float(seconds.read_text())
    tests = sum(text.count("\ndef test_") for text in _texts().values())
    return OTHERS + tests * PER_TEST[kind] * 2 / (os.cpu_count() or 1)


def _texts() -> "dict[Path, str]":
    """Return the texts of all files of tests."""
    files = [path for folder in TESTS for path in (ROOT / folder).glob("**/test_*.py")]
    return {path: path.read_text("utf-8") for path in files}


def changed_tests() -> "list[str]":
    """Return pytest's options for the tests of all files that differ from the last commit.

    Trees of tests mirror the source trees. For a file without a mirror, these are the test files
    that import it. If none does, they are those of the test folder named after the file's own
    folder that name it or a pattern such as `*.md`, or the whole folder. All pages, including the
    README, belong to the folder `docs`. Tests of all choices add to those of a choice. Of the tests
    with `of_a_page` in their names, those of unchanged pages are left out.
    """
    tests = set()
    pages = []
    for listing in (["diff", "--name-only", "HEAD"], ["ls-files", "-o", "--exclude-standard"]):
        done = subprocess.run(["git", *listing], cwd=ROOT, stdout=subprocess.PIPE)
        if done.returncode:
            refuse("--changed asks git what differs from the last commit; see above")
        for name in done.stdout.decode().splitlines():
            tests |= _tests_of(Path(name))
            if re.fullmatch(r"(engine/)?(docs/)?\w+\.md", name):
                pages.append(name)
    if not pages:
        return sorted(tests)
    return [*sorted(tests), "-k", " or ".join(["not of_a_page", *sorted(pages)])]


def _tests_of(path: Path) -> "set[str]":
    name = path.as_posix()
    if name.startswith(tuple(folder + "/" for folder in TESTS)):
        tested_path = path if path.name.startswith("test_") else path.parent
        if path.suffix != ".py" or not (ROOT / tested_path).exists():
            return set()
        return {tested_path.as_posix()}
    start, trees = next(each for each in MIRRORS if re.match(each[0], name))
    inner = Path(re.sub(f"^{start}", "", name))
    file = inner.name if path.stem != "__init__" else f"{path.parent.name}.py"
    mirrors = {f"{tree}/{inner.with_name(f'test_{file}').as_posix()}" for tree in trees}
    mirrors = {mirror for mirror in mirrors if (ROOT / mirror).is_file()}
    if mirrors:
        return mirrors
    tests = _importers(path) or _readers(path, inner, trees)
    if start == "configs/":
        tests |= {ROOT / test for test in OF_CONFIGS if (ROOT / test).is_file()}
    return {test.relative_to(ROOT).as_posix() for test in tests}


def _importers(path: Path) -> "set[Path]":
    """Return the files of tests that import a module."""
    if path.suffix != ".py":
        return set()
    imports = re.compile(rf"(import|from) .*\b{re.escape(path.stem)}\b")
    return {test for test, text in _texts().items() if imports.search(text)}


def _readers(path: Path, inner: Path, trees: "tuple[str, ...]") -> "set[Path]":
    """Return the files of tests that name a file; if none does, the folder of its tests."""
    folder = "docs" if path.suffix == ".md" else inner.parts[0]
    folders = [ROOT / tree / folder for tree in trees if (ROOT / tree / folder).is_dir()]
    pattern = rf"\b{re.escape(path.name)}"
    if path.suffix:
        pattern += rf"|\*{re.escape(path.suffix)}\b"
    readers = {
        test
        for test, text in _texts().items()
        if any(each in test.parents for each in folders) and re.search(pattern, text)
    }
    return readers or set(folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
