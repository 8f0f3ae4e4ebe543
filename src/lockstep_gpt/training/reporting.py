"""Where a rank's words go: rank 0 to the terminal and `train.log`, the others to files."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from lockstep_gpt.config import Config
from lockstep_gpt.run_directory import RunDirectory
from lockstep_gpt.training.ranks import Ranks

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}
# Said by Lightning at every start, true, and of no use to a reader of our receipt.
NOISE = [
    r".*does not have many workers which may be a bottleneck.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*You're resuming from a checkpoint that ended before the epoch ended.*",
]


class AboveBar(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above a progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        tqdm.write(self.format(record), file=self.stream)


@contextlib.contextmanager
def reporting(run: RunDirectory, ranks: Ranks, config: Config) -> Iterator[TextIO]:
    """Set up logging and warnings for the life of a rank; yield the terminal, for failures."""
    root = logging.getLogger()
    before = root.handlers[:]
    terminal = _terminal(run, ranks)
    console = AboveBar(sys.stdout)
    root.handlers = [console] if ranks.rank else [console, logging.FileHandler(run.log)]
    root.setLevel(LEVELS[config.verbosity])
    for handler in root.handlers:
        handler.setFormatter(logging.Formatter("%(message)s"))
    _tame_libraries(config)
    try:
        yield terminal
    finally:
        for handler in root.handlers:
            handler.flush()
            handler.close()
        root.handlers = before


def _terminal(run: RunDirectory, ranks: Ranks) -> TextIO:
    """Return the terminal; send what rank N > 0 prints, C++ libraries included, to its file."""
    if ranks.rank == 0:
        return sys.stderr
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8")
    path = run.rank_log(ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return terminal


def drop_rank_log(run: RunDirectory, ranks: Ranks) -> None:
    """Remove the file of a rank that ended well."""
    if ranks.rank:
        run.rank_log(ranks.rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files are still in the folder
            run.rank_log(ranks.rank).parent.rmdir()


def _tame_libraries(config: Config) -> None:
    """Route libraries' words through our handlers; only warnings, unless debugging."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "fsspec"):
        library = logging.getLogger(name)
        library.handlers = []
        library.propagate = True
        if config.verbosity != "debug":
            library.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}"
    for pattern in NOISE:
        warnings.filterwarnings("ignore", pattern)
