"""What a worker process of a loader does about its rank's end, and about signals."""

import os
import signal
from types import FrameType

from lockstep.processes import STOP_SIGNALS, end_with_parent


def begin(rank: int, _number: int) -> None:
    """Let this worker end with its rank, and not before it: the rank saves the run first.

    A launcher sends SIGTERM to the process group of a rank, and a terminal Ctrl-C to that of a
    command. Torch lets a rank fail if a signal ends one of its workers.

    Args:
        rank: the id of the process that reads what this one loads.
        _number: of this worker; torch tells it.
    """
    end_with_parent(rank)  # also if it is killed: a worker would keep its connections open
    os.setsid()
    for signum in STOP_SIGNALS:
        if signum != signal.SIGTERM:  # with which the rank ends its workers
            signal.signal(signum, _leave_to_rank)


def _leave_to_rank(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing: the rank gets the signal, too. Unlike SIG_IGN, no program inherits this."""
