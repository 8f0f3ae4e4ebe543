"""What a command shows of the log while it runs."""

import contextlib
import logging
import sys
from collections.abc import Iterator

LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}


@contextlib.contextmanager
def log_to_stdout() -> Iterator[None]:
    """Write log records to standard output while a command runs."""
    root = logging.getLogger()
    handlers_before = root.handlers
    level_before = root.level
    root.handlers = [logging.StreamHandler(sys.stdout)]
    logging.getLogger("hydra").setLevel(logging.WARNING)  # it repeats our line of a sweep's job
    try:
        yield
    finally:
        root.handlers = handlers_before
        root.setLevel(level_before)
