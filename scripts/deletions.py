"""Delete extras of a project by hand, one after another, and test the rest; takes long.

usage: .venv/bin/python scripts/deletions.py [options] [NAME ...]

This runs the project's whole test suite without each extra. With --pairs, it imports and collects
the tests without each pair; with --pairs --suites, it runs the suite without each. NAMEs limit
what is deleted. The exit status is 1 if anything failed.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from hooks.answers import EXTRAS, places  # noqa: E402

PACKAGE = "my_gpt"  # the package of a project with the default answers
SHOWN_CHARACTERS = 3000  # characters of a failure's output


def delete(project: Path, extras: Iterable[str]) -> None:
    """Delete the files of extras of a project, as a person would."""
    for pattern in [pattern for extra in extras for pattern in places(extra)]:
        place = pattern.removesuffix("/*").replace("lockstep_gpt", PACKAGE)
        for path in [*project.glob(place)]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def set_up(project: Path) -> str:
    """Create a `.venv` in a project with this environment's libraries; return its Python."""
    venv = project / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    ours = sysconfig.get_path("purelib")
    theirs = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (theirs / "borrowed.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    for tool in Path(sysconfig.get_path("scripts")).iterdir():
        if not (venv / "bin" / tool.name).exists():
            (venv / "bin" / tool.name).symlink_to(tool)
    python = str(venv / "bin/python")
    install = ["install", "-q", "--no-deps", "-e", str(project)]
    subprocess.run([python, "-m", "pip", *install], check=True)
    return python


def examine(project: Path, suites: bool, extras: tuple[str, ...]) -> tuple[str, int, float, str]:
    """Test a copy without `extras`; return their names, exit status, seconds, and output."""
    started = time.monotonic()
    copy = project.with_name("+".join(extras))
    shutil.copytree(project, copy)
    delete(copy, extras)
    log = copy.with_suffix(".log")
    if suites:
        words = [set_up(copy), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        with log.open("w") as file:
            status = subprocess.run(words, cwd=copy, stdout=file, stderr=file).returncode
    else:  # in a fork, which has already imported the libraries
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            status = _collect(copy)
        except Exception:  # whatever an import raises is the result, and other copies go on
            status = 1
            traceback.print_exc()
        sys.stdout.flush()
    shutil.rmtree(copy)
    return " + ".join(extras), status, time.monotonic() - started, log.read_text()


def _collect(project: Path) -> int:
    """Import all modules of a project and collect its tests; return pytest's exit status."""
    import pytest

    os.chdir(project)
    sys.path[:0] = [str(project / "src"), str(project)]
    package = importlib.import_module(PACKAGE)
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        importlib.import_module(module.name)
    return int(pytest.main(["-q", "--collect-only", "--assert=plain", "-p", "no:cacheprovider"]))


def main() -> int:
    """Print one row for each deletion, and the output of failures; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="delete these (default: all)")
    parser.add_argument(
        "--pairs", action="store_true", help="delete every pair, and only collect the tests"
    )
    parser.add_argument(
        "--suites", action="store_true", help="with --pairs, run the suite without each pair"
    )
    parser.add_argument("--jobs", type=int, default=1, help="projects at a time (default: 1)")
    parser.add_argument("--of", default="all", help="the extras of the project (default: all)")
    options = parser.parse_args()
    names = [name for name in EXTRAS if name in (options.names or EXTRAS)]
    unknown = {*options.names} - {*EXTRAS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(EXTRAS)}")
    suites = options.suites or not options.pairs
    if not suites:
        importlib.import_module("lightning")  # once, for all forks
    failed = 0
    with tempfile.TemporaryDirectory(prefix="deletions-") as folder:
        answers = ["--no-input", "-o", folder, f"extras={options.of}", "git_init=no"]
        cookiecutter = [sys.executable, "-m", "cookiecutter", str(ROOT), *answers]
        subprocess.run(cookiecutter, check=True, capture_output=True)
        work = partial(examine, Path(folder) / "my-gpt", suites)
        chosen = list(itertools.combinations(names, 2 if options.pairs else 1))
        print(f"{'without':<24}{'exit':>4}{'seconds':>9}  said", flush=True)
        with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
            for without, status, seconds, output in pool.imap(work, chosen, chunksize=1):
                failed += status != 0
                last = next(iter(output.splitlines()[-1:]), "")
                print(f"{without:<24}{status:>4}{seconds:>9.0f}  {last}", flush=True)
                if status:
                    print(output[-SHOWN_CHARACTERS:], flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
