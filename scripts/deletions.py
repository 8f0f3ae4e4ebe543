"""Delete every two extras of a project by hand, and see what is left; takes minutes.

usage: .venv/bin/python scripts/deletions.py [--suites]
  without options, each project imports and collects its tests; with --suites it runs them all
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from hooks.answers import EXTRAS  # noqa: E402

PACKAGE = "my_gpt"  # of a project with the default answers
FOLDERS = [name for name in EXTRAS if any("/extras/" in path for path in EXTRAS[name])]


def copy_without(project: Path, target: Path, extras: Iterable[str]) -> None:
    """Copy a project that has all extras, and delete some as a person would: their own files."""
    shutil.copytree(project, target)
    for name in itertools.chain.from_iterable(EXTRAS[extra] for extra in extras):
        path = target / name.replace("lockstep_gpt", PACKAGE)
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> int:
    """Print a line for each pair; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suites", action="store_true", help="run whole suites; takes hours")
    words = ["-q"] if parser.parse_args().suites else ["-q", "--collect-only", "--assert=plain"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="deletions-") as folder:
        place = Path(folder)
        answers = ["--no-input", "-o", folder, "extras=all", "git_init=no"]
        cookiecutter = [sys.executable, "-m", "cookiecutter", str(ROOT), *answers]
        subprocess.run(cookiecutter, check=True, capture_output=True)
        for pair in itertools.combinations(FOLDERS, 2):
            project = place / "+".join(pair)
            copy_without(place / "my-gpt", project, pair)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
                cwd=project,
                env={**os.environ, "PYTHONPATH": str(project / "src")},
                capture_output=True,
                text=True,
            )
            failed += done.returncode != 0
            print(f"without {' and '.join(pair)}: {done.stdout.splitlines()[-1]}", flush=True)
            if done.returncode:
                print(done.stdout[-3000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
