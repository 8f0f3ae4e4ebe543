"""Private names of Python's own library, each with the reason. Versions: Python 3.11 to 3.14."""

import atexit
import threading


def run_exit_handlers() -> None:
    """Wait for threads and run exit handlers, as the interpreter does before it tears down modules.

    There is no public way to do the first part of an exit without the second, which takes a second
    and a half in a rank.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
