"""How fast a corpus becomes token files, and how much memory that needs.

usage: python lab/benchmarks/prepare.py [--large 1000] [--rounds 3] [--json FILE]

The corpus is the source of the Python standard library, repeated, in files of 8 MB. Each build runs
in its own process, with one process that tokenizes; its seconds are those that it reports, and its
memory is its peak. For byte-pair encoding of 16 MB, `encode_batch` is the library `tokenizers`
itself with the same tokenizer on the same documents, interleaved with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from itertools import cycle
from pathlib import Path

from lockstep.tokens.shards import load_index
from lockstep.tokens.tokenizer import PIECE
from tokenizers import Tokenizer

FILE = 8 << 20  # bytes
# The system's peak for a child would start at this process's own peak, so the build prints its own.
BUILD = """
import pathlib, sys
import lockstep_gpt
from lockstep.commands import main
status = main(sys.argv[1:])
print(pathlib.Path("/proc/self/status").read_text())
sys.exit(status)
"""
PEAK = r"VmHWM:\s+(\d+) kB"


def main() -> None:
    """Measure, and print one table."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = _measured(Path(folder), options)
    for name, value in result.items():
        print(f"  {name:<44}{value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", type=int, default=1000, help="MB of the large corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where all goes (default: the system's own)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _measured(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    small = _corpus(folder / "small", 50)
    large = _corpus(folder / "large", options.large)
    texts = _corpus(folder / "texts", 16)
    plain = []
    ours = []
    theirs = []
    for _ in range(options.rounds):
        plain.append(_megabytes(large) / _build(folder, large)[0])
        ours.append(_megabytes(texts) / _build(folder, texts, "tokenizer=tokenizer.json")[0])
        theirs.append(_megabytes(texts) / _encode_batch(folder, texts))
    peaks = [_build(folder, corpus)[1] / 2**20 for corpus in (small, large)]
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "bytes, MB/s": statistics.median(plain),
        "byte-pair encoding, MB/s": statistics.median(ours),
        "encode_batch, MB/s": statistics.median(theirs),
        "ours / encode_batch": ratio,
        "peak memory for 50 MB, MiB": peaks[0],
        f"peak memory for {options.large} MB, MiB": peaks[1],
        "large / small": peaks[1] / peaks[0],
    }


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def _corpus(folder: Path, megabytes: int) -> Path:
    folder.mkdir()
    library_files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = cycle([path.read_text("utf-8") for path in library_files])
    for number in range(-(-megabytes * 1_000_000 // FILE)):
        with (folder / f"{number:04}.txt").open("w", encoding="utf-8") as file:
            while file.tell() < FILE:
                file.write(next(texts))
    return folder


def _build(folder: Path, corpus: Path, *overrides: str) -> tuple[float, int]:
    """Return the seconds that a build reports, and the bytes of its peak memory."""
    if overrides and not (folder / "tokenizer.json").exists():
        _learn(folder, corpus)
    shutil.rmtree(folder / "data", ignore_errors=True)
    words = ["prepare", "data=text", f"data.source.path={corpus}", "data.root=data", *overrides]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *words],
        cwd=folder,
        env={**os.environ, "RAYON_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    seconds = re.search(r" in ([\d.]+) s", done.stdout)
    peak = re.search(PEAK, done.stdout)
    if seconds is None or peak is None:
        raise SystemExit(f"the build said nothing of its time and memory: {done.stdout}")
    return float(seconds[1]), int(peak[1]) << 10


def _learn(folder: Path, corpus: Path) -> None:
    """Learn a byte-pair encoding in advance, so that no measured build does so."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    words = [
        "prepare",
        "data=text",
        f"data.source.path={corpus}",
        "data.root=data",
        "tokenizer=bpe",
    ]
    subprocess.run([sys.executable, "-m", "lockstep_gpt", *words], cwd=folder, check=True)
    (prepared,) = (folder / "data").glob("text-*")
    values = load_index(prepared).tokenizer
    (folder / "tokenizer.json").write_text(values["json"])


def _encode_batch(folder: Path, corpus: Path) -> float:
    """Return the seconds of the library itself, with one thread like ours."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    seconds = 0.0
    for path in sorted(corpus.iterdir()):
        text = path.read_text("utf-8")
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        started = time.perf_counter()
        tokenizer.encode_batch(pieces, add_special_tokens=False)
        seconds += time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    main()
