#!/usr/bin/env python3
"""Set up .venv where it is missing or out of date, then run a command of the project.

usage: python3 scripts/dev.py COMMAND [arguments]
  train [overrides]       train; prepare, generate and all other commands are passed on likewise
  test [pytest options]   lint, types, then the tests, up to the first that fails; the first time,
                          what they and the extras need is installed as well
  test --changed          the same, with the tests of what differs from the last commit only
  update [TEMPLATE]       take over a later state of the template; see update --help
"""
# Python 3.6 must still be able to start this, so that an unsupported Python gets a clear line.

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

POSIX = os.name == "posix"
if POSIX:
    import fcntl
ROOT = Path(__file__).resolve().parent.parent
VENV, PINS = ROOT / ".venv", ROOT / "constraints.txt"
PYTHON = str(VENV / ("bin/python" if POSIX else "Scripts/python.exe"))
STAMP = VENV / "set-up.sha256"  # written last: an environment without it is half made
UV_NAMES = {
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
}
ALL = "all"  # in the stamp: not only what `train` needs
# Options of pytest that rule out our -n; `-m gpu` is among them, as tests would share the GPUs.
OWN_PROCESSES = ("-n", "--pdb", "--trace", "gpu")
SECONDS = VENV / "test-seconds"  # what all tests took the last time that they passed
PER_TEST = 0.7  # seconds of one core, where they have never passed


def main(arguments: "list[str]") -> int:
    """Run the command that `arguments` name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(str(__doc__))
        return 0 if arguments else 2
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        _refuse(f"needs Python 3.11 to 3.13, not {sys.version[:6]}; try python3.12 scripts/dev.py")
    if arguments[0] == "update" and (ROOT / "scripts/update.py").is_file():
        import update

        return update.main(arguments[1:], ROOT)
    set_up(everything=arguments[0] == "test")
    if arguments[0] == "test":
        return check(arguments[1:])
    command = [PYTHON, "-m", "lockstep_gpt", *arguments]
    return os.execv(PYTHON, command) if POSIX else subprocess.call(command)


def check(options: "list[str]") -> int:
    """Lint, check types and test, up to the first that fails."""
    whole = not options
    if "--changed" in options:
        options = [each for each in options if each != "--changed"] + changed_tests()
        _say(f"of what has changed: {' '.join(options) or 'no tests, only lint and types'}")
    spread = [] if any(each.startswith(OWN_PROCESSES) for each in options) else ["-n", "auto"]
    steps = [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]]
    if whole or options:
        steps.append(["pytest", *spread, "--durations=10", *options])
    if whole:
        _say(f"lint, types and all tests: about {_estimate() / 60:.0f} minutes")
    for step in steps:
        _say(" ".join(step))
        started = time.monotonic()
        status = _to_the_end([PYTHON, "-m", *step])
        if status:
            return status
    if whole:
        SECONDS.write_text(str(time.monotonic() - started))
    return 0


def _to_the_end(words: "list[str]") -> int:
    """Run a step; a signal to us alone reaches all of its processes, and none outlives it."""
    step = subprocess.Popen(words, cwd=ROOT, start_new_session=POSIX)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if POSIX else ():
        signal.signal(signum, lambda number, _: os.killpg(step.pid, number))
    status = step.wait()
    with contextlib.suppress(AttributeError, ProcessLookupError):  # no groups; nothing is left
        os.killpg(step.pid, signal.SIGKILL)
    return 128 - status if status < 0 else status


def _estimate() -> float:
    """Return the seconds that all tests took here the last time, or may take."""
    if SECONDS.is_file():
        return float(SECONDS.read_text())
    tests = sum(path.read_text("utf-8").count("\ndef test_") for path in ROOT.glob("tests/**/*.py"))
    return tests * PER_TEST * 2 / (os.cpu_count() or 1)


def changed_tests() -> "list[str]":
    """Return the test files of all files that differ from the last commit.

    The tree of tests mirrors that of the source; a file without a mirror is tested by the files
    that import it, and one that nobody imports by the folder that is named after its own.
    """
    found = set()
    for listing in (["diff", "--name-only", "HEAD"], ["ls-files", "-o", "--exclude-standard"]):
        done = subprocess.run(["git", *listing], cwd=ROOT, stdout=subprocess.PIPE)
        if done.returncode:
            _refuse("--changed asks git what differs from the last commit; see above")
        for name in done.stdout.decode().splitlines():
            found |= _tests_of(Path(name))
    return sorted(found)


def _tests_of(path: Path) -> "set[str]":
    if path.parts[0] == "tests":
        tested = path if path.name.startswith("test_") else path.parent
        return {tested.as_posix()} if (ROOT / tested).exists() and path.suffix == ".py" else set()
    inner = path.parts[2:] if path.parts[0] == "src" else path.parts
    mirror = Path("tests", *inner[:-1], "test_" + inner[-1])
    if (ROOT / mirror).is_file():
        return {mirror.as_posix()}
    imports = re.compile(rf"(import|from) .*\b{re.escape(path.stem)}\b")
    tests = [each for each in ROOT.glob("tests/**/test_*.py") if path.suffix == ".py"]
    importers = {each for each in tests if imports.search(each.read_text("utf-8"))}
    folder = ROOT / "tests" / inner[0]
    folders = {folder} if folder.is_dir() and not importers else set()
    return {each.relative_to(ROOT).as_posix() for each in importers | folders}


def set_up(everything: bool = False) -> None:
    """Make `.venv` hold the project and its pins, unless it does already.

    Args:
        everything: also the dependency group `dev`, and the extras that it names.
    """
    wanted = fingerprints() + ([ALL] if everything else [])
    if _holds(wanted):
        return
    _say("setting up .venv (a few minutes, once) ...")
    with PINS.open("r+b") as lock:
        if POSIX:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another call may be at it
        os.set_inheritable(lock.fileno(), True)  # a pip that outlives this process keeps the lock
        if not _holds(wanted):
            _install(wanted)
    _say(".venv is ready")


def fingerprints() -> "list[str]":
    """Return what a `.venv` is good for: this folder and Python; these needs."""
    place = f"{sys.version_info[:2]} ".encode() + os.fsencode(ROOT)
    needs = (ROOT / "pyproject.toml").read_bytes() + PINS.read_bytes()
    return [hashlib.sha256(part).hexdigest() for part in (place, needs)]


def _stamp() -> "list[str]":
    return STAMP.read_text().split() if STAMP.is_file() and Path(PYTHON).exists() else []


def _holds(wanted: "list[str]") -> bool:
    return _stamp()[: len(wanted)] == wanted


def requirements(group: str) -> "list[str]":
    """Return what a dependency group asks for, with the groups that it includes (PEP 735).

    Not `pip install --group`, which pip has since 25.1 only.
    """
    import tomllib

    def asked(name: str) -> "list[str]":
        found = []
        for each in groups[name]:
            found += asked(each["include-group"]) if isinstance(each, dict) else [each]
        return found

    about = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    groups, own = about["dependency-groups"], re.escape(about["project"]["name"])
    return [re.sub(rf"^{own}(?=\[)", ".", each) for each in asked(group)]


def _install(wanted: "list[str]") -> None:
    found = _stamp()
    anew = found[:1] != wanted[:1]  # another place or Python, or half made
    STAMP.unlink(missing_ok=True)
    if anew and subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)], cwd=ROOT):
        _refuse("cannot make .venv, see above; on Debian and Ubuntu: apt install python3-venv")
    needs = ["-c", PINS.name, "-e", "."]
    if ALL in wanted:
        found_there = requirements("dev")
        extras = [name for each in found_there if each[0] == "." for name in each[2:-1].split(",")]
        needs[-1] = f".[{','.join(extras)}]" if extras else "."
        needs += [each for each in found_there if each[0] != "."]
    for installer, settings in _installers():
        done = subprocess.run(
            [*installer, *needs],
            cwd=ROOT,
            env={**settings, **os.environ},
            close_fds=False,
            capture_output=True,
            errors="replace",
        )
        if not done.returncode:
            break
    else:
        sys.stderr.write(done.stdout + done.stderr)
        if not anew:
            STAMP.write_text(" ".join(found))  # what was there before is still good
        _refuse("pip failed, see above; it needs the network, or PIP_FIND_LINKS=FOLDER of wheels")
    STAMP.write_text(" ".join(wanted))


def _installers() -> "list[tuple[list[str], dict[str, str]]]":
    """Return what installs, with settings of its environment: uv where it is, then pip.

    Whoever has told pip where packages are has told uv, unless that was told something else.
    """
    pip = [PYTHON, "-m", "pip", "install", "-q"]
    uv = shutil.which("uv")
    if not uv:
        return [(pip, {})]
    told = {UV_NAMES[name]: os.environ[name] for name in UV_NAMES if os.environ.get(name)}
    return [([uv, "pip", "install", "-q", "--python", PYTHON], told), (pip, {})]


def _say(line: str) -> None:
    sys.stderr.write(f"dev.py: {line}\n")  # stdout belongs to the command


def _refuse(line: str) -> None:
    _say(line)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
