"""Private names of Python's own library, each with the reason. Versions: Python 3.11 to 3.14."""

import atexit
import ctypes
import random
import threading

# The object whose methods are `random`'s functions, and where its state is in memory.
GENERATOR = random.random.__self__  # type: ignore[attr-defined]
HEADER = object.__basicsize__
STATE_BYTES = type(GENERATOR).__basicsize__ - HEADER


def random_state() -> bytes:
    """Return what changes when a function of `random` draws; `random.getstate` takes 10 us."""
    return ctypes.string_at(id(GENERATOR) + HEADER, STATE_BYTES)


def run_exit_handlers() -> None:
    """Wait for threads and run exit handlers, as the interpreter does before it tears down modules.

    There is no public way to do the first part of an exit without the second, which takes a second
    and a half in a rank.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
