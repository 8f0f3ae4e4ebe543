"""Where a rank's output goes: rank 0's to the terminal and train.log, others' to their files."""

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO

from tqdm import tqdm

from lockstep.logs import LEVELS
from lockstep.ranks.ranks import Ranks
from lockstep.run.directory import RunDirectory

# Lightning prints these. They are true, but don't help a reader of our receipt.
NOISE = [
    r".*does not have many workers which may be a bottleneck.*",
    r".*`isinstance\(treespec, LeafSpec\)` is deprecated.*",
    r".*Checkpoint directory .* exists and is not empty.*",
    r".*The `srun` command is available on your system but is not used.*",
    r".*You're resuming from a checkpoint that ended before the epoch ended.*",
]
LIBRARIES = ("lightning", "lightning.pytorch", "lightning.fabric", "torch", "fsspec")
CHOSEN_BY_USERS = ("lightning.pytorch.callbacks", "lightning.pytorch.profilers")  # for their output


class AboveBar(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines above a progress bar instead of into it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; ignore a full disk or closed pipe: logging must not end a run."""
        with contextlib.suppress(OSError):
            tqdm.write(self.format(record), file=self.stream)
            self.flush()  # a file or a pipe would only get it at the end of the run


@contextlib.contextmanager
def routed_output(
    directory: RunDirectory, ranks: Ranks, verbosity: str = "normal"
) -> Iterator[TextIO]:
    """Set up logging and warnings while a rank runs; yield the terminal, for failures.

    Args:
        directory: the run.
        ranks: this process among all.
        verbosity: `quiet`, `normal`, or `debug`.
    """
    terminal = _terminal(directory, ranks)
    handlers = [AboveBar(sys.stdout)]
    with contextlib.ExitStack() as undo, warnings.catch_warnings():
        if ranks.rank == 0:  # unbuffered: closing it can't fail on a full disk
            log = undo.enter_context(directory.log.open("ab", buffering=0))
            handlers.append(AboveBar(io.TextIOWrapper(log, "utf-8", write_through=True)))
        for handler in handlers:
            handler.setFormatter(logging.Formatter("%(message)s"))
            undo.callback(handler.close)

        # Libraries log through our handlers.
        for name in ("", *LIBRARIES, *CHOSEN_BY_USERS):
            library = logging.getLogger(name)
            before = {"handlers": library.handlers, "propagate": library.propagate}
            undo.callback(vars(library).update, before)
            undo.callback(library.setLevel, library.level)
            vars(library).update(handlers=[], propagate=True)
            if verbosity != "debug":
                library.setLevel(logging.INFO if name in CHOSEN_BY_USERS else logging.WARNING)
        logging.root.handlers = [*handlers]
        logging.root.setLevel(LEVELS[verbosity])

        # So do warnings, in one line each.
        undo.callback(setattr, warnings, "formatwarning", warnings.formatwarning)
        warnings.formatwarning = lambda message, *_args, **_kwargs: f"warning: {message}"
        logging.captureWarnings(True)
        undo.callback(logging.captureWarnings, False)
        for pattern in NOISE:
            warnings.filterwarnings("ignore", pattern)
        yield terminal


def _terminal(directory: RunDirectory, ranks: Ranks) -> TextIO:
    """Return the terminal; redirect rank N > 0's output, also of C++ libraries, to its file."""
    if ranks.rank == 0:
        return sys.stderr
    terminal = os.fdopen(os.dup(2), "w", encoding="utf-8")
    path = directory.rank_log(ranks.rank)
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return terminal


def drop_rank_log(directory: RunDirectory, ranks: Ranks) -> None:
    """Remove the file of a rank that succeeded."""
    if ranks.rank == 0:
        return
    path = directory.rank_log(ranks.rank)
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other ranks' files are still in the folder
        path.parent.rmdir()
