"""`run.py prepare`: packages for a GPU's machine that has torch, but no network to get them from.

Copies those that the project imports besides torch and NumPy, and that are Python alone: they work
on another version of Python, and on another processor.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePath

from measuring import ROOT

WORD = "prepare"  # on the command line
OF_HYDRA_1_3 = "antlr4-python3-runtime"  # later versions have no use for it
# What training imports, and what these import.
PACKAGES = (
    "hydra-core",
    "omegaconf",
    OF_HYDRA_1_3,
    "lightning",
    "lightning-utilities",
    "torchmetrics",
    "packaging",
    "pyyaml",
    "tqdm",
)
NOT_COPIED = {".so", ".pyd", ".pyc"}  # compiled; pyyaml also works without


def main(words: list[str]) -> int:
    """Copy the packages, print the command to run there, and return the exit status."""
    parser = argparse.ArgumentParser(prog=f"run.py {WORD}")
    parser.add_argument(
        "--folder", type=Path, default=Path(".gpu/site"), help="by default, .gpu/site"
    )
    parser.add_argument(
        "--has",
        default="",
        metavar="NAME,...",
        help=f"what the machine has: not copied; of {', '.join(PACKAGES)}",
    )
    options = parser.parse_args(words)
    present = set(filter(None, options.has.split(",")))
    unknown = present.difference(PACKAGES)
    if unknown:
        parser.error(f"--has {', '.join(sorted(unknown))}: there are {', '.join(PACKAGES)}")
    folder = ROOT / options.folder
    if not distribution("hydra-core").version.startswith("1.3."):
        present.add(OF_HYDRA_1_3)
    try:
        copied = [copy(name, folder) for name in PACKAGES if name not in present]
    except PackageNotFoundError as absent:
        sys.stderr.write(f"run.py: {sys.executable} lacks {absent.name}; install the project\n")
        return 2
    (folder / ".gitignore").write_text("*\n")
    print(f"{sum(copied) / 1e6:.1f} MB in {folder}")
    print("Copy the repository, with this folder, to the machine with the GPU; run there, in it:\n")
    print(f"PYTHONPATH={options.folder}:engine/src:src python3 lab/first_hour/run.py A")
    return 0


def copy(name: str, folder: Path) -> int:
    """Replace a package's files in a folder; return their bytes."""
    package = distribution(name)
    paths = list(files_of(package))
    for top in {path.parts[0] for path in paths}:
        old = folder / top
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    size = 0
    for path in paths:
        source = Path(str(package.locate_file(path)))
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        size += source.stat().st_size
    return size


def files_of(package: Distribution) -> Iterator[PurePath]:
    """Yield what of a package is worth copying, relative to the folder with all packages."""
    for path in package.files or []:
        is_inside = not path.is_absolute() and ".." not in path.parts  # else a script
        if is_inside and path.suffix not in NOT_COPIED:
            yield path
