"""Private names of Python's own library, each with the reason. Versions: Python 3.11 to 3.14."""

import atexit
import multiprocessing.util
import threading
import weakref


def run_exit_handlers() -> None:
    """Wait for threads and run exit handlers, as the interpreter does before it tears down modules.

    There is no public way to do the first part of an exit without the second, which takes a second
    and a half in a rank.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def forget_exit_handlers() -> None:
    """Leave the exit handlers of a fork to its server, whose modules registered them.

    multiprocessing does the same for its forks, with the same names.
    """
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
