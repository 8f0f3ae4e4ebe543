#!/usr/bin/env python3
"""Set up .venv where it is missing or out of date, then run a command of the project.

usage: python3 scripts/dev.py COMMAND [arguments]
  train [overrides]       train; prepare, generate and all other commands are passed on likewise
  test [pytest options]   lint, types, then the tests, up to the first that fails
"""
# Python 3.6 must still be able to start this, so that an unsupported Python gets a clear line.

import hashlib
import os
import subprocess
import sys
from pathlib import Path

POSIX = os.name == "posix"
if POSIX:
    import fcntl
ROOT = Path(__file__).resolve().parent.parent
VENV, PINS = ROOT / ".venv", ROOT / "constraints.txt"
PYTHON = str(VENV / ("bin/python" if POSIX else "Scripts/python.exe"))
STAMP = VENV / "set-up.sha256"  # written last: an environment without it is half made
OWN_PROCESSES = ("-n", "--pdb", "--trace")  # options of pytest that rule out our -n


def main(arguments: "list[str]") -> int:
    """Run the command that `arguments` name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(str(__doc__))
        return 0 if arguments else 2
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        _refuse(f"needs Python 3.11 to 3.13, not {sys.version[:6]}; try python3.12 scripts/dev.py")
    set_up()
    if arguments[0] == "test":
        return check(arguments[1:])
    command = [PYTHON, "-m", "lockstep_gpt", *arguments]
    return os.execv(PYTHON, command) if POSIX else subprocess.call(command)


def check(options: "list[str]") -> int:
    """Lint, check types and test, up to the first that fails."""
    spread = [] if any(each.startswith(OWN_PROCESSES) for each in options) else ["-n", "auto"]
    lint = [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]]
    for step in [*lint, ["pytest", *spread, *options]]:
        _say(" ".join(step))
        status = subprocess.call([PYTHON, "-m", *step], cwd=ROOT)
        if status:
            return status
    return 0


def set_up() -> None:
    """Make `.venv` hold the project and its pins, unless it does already."""
    place = f"{sys.version_info[:2]} ".encode() + os.fsencode(ROOT)
    needs = (ROOT / "pyproject.toml").read_bytes() + PINS.read_bytes()
    wanted = [hashlib.sha256(part).hexdigest() for part in (place, needs)]
    if _stamp() == wanted:
        return
    _say("setting up .venv (a few minutes, once) ...")
    with PINS.open("r+b") as lock:
        if POSIX:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another call may be at it
        os.set_inheritable(lock.fileno(), True)  # a pip that outlives this process keeps the lock
        if _stamp() != wanted:
            _install(wanted)
    _say(".venv is ready")


def _stamp() -> "list[str]":
    return STAMP.read_text().split() if STAMP.is_file() and Path(PYTHON).exists() else []


def _install(wanted: "list[str]") -> None:
    found = _stamp()
    anew = found[:1] != wanted[:1]  # another place or Python, or half made
    STAMP.unlink(missing_ok=True)
    if anew and subprocess.call([sys.executable, "-m", "venv", "--clear", str(VENV)], cwd=ROOT):
        _refuse("cannot make .venv, see above; on Debian and Ubuntu: apt install python3-venv")
    pip = [PYTHON, "-m", "pip", "install", "-q", "-c", PINS.name, "-e", ".[dev]"]
    done = subprocess.run(pip, cwd=ROOT, close_fds=False, capture_output=True, errors="replace")
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        if not anew:
            STAMP.write_text(" ".join(found))  # what was there before is still good
        _refuse("pip failed, see above; it needs the network, or PIP_FIND_LINKS=FOLDER of wheels")
    STAMP.write_text(" ".join(wanted))


def _say(line: str) -> None:
    sys.stderr.write(f"dev.py: {line}\n")  # stdout belongs to the command


def _refuse(line: str) -> None:
    _say(line)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
