"""Why ranks died: cause and remedy, and where they waited, from the ends of their logs."""

import re
from pathlib import Path

from lockstep.exits import Ending
from lockstep.run import remedies
from lockstep.run.directory import RunDirectory

TAIL = 20_000  # characters at the end of a log that may say why a process died
# A line of a Python stack, in code that no package manager has installed.
FRAME = re.compile(r'^ *File "(?!.*/(?:site-packages|lib/python))(.+)", line (\d+), in (.+)$')


def explain_deaths(run: RunDirectory, ended: dict[int, Ending]) -> str:
    """Return cause and remedy from the ended ranks' logs, or from the signals that ended them.

    Args:
        run: has the logs.
        ended: rank -> how it ended.
    """
    logs = {rank: _end_of(run.log_of(rank)) for rank in ended}
    for rank, ending in ended.items():
        explanation = remedies.explain_death(ending.killed_by, logs[rank])
        if explanation:
            return explanation + _places_of_waiting(logs)
    return ""


def _end_of(log: Path) -> str:
    """Return the end of a log, in which a rank may say why it died; "" without a log."""
    return log.read_text(errors="replace")[-TAIL:] if log.is_file() else ""


def _places_of_waiting(logs: dict[int, str]) -> str:
    """Return a line with the places where ranks waited for others in vain, if any did."""
    ranks_at: dict[str, list[int]] = {}
    for rank, log in logs.items():
        frames = [*filter(None, map(FRAME.match, log.splitlines()))]
        if frames and re.search(remedies.COLLECTIVE_TIMEOUT, log):
            file, line, function = frames[-1].groups()
            ranks_at.setdefault(f"{file}:{line}, in {function}", []).append(rank)
    if not ranks_at:
        return ""
    places = [f"rank {', '.join(map(str, ranks))} at {place}" for place, ranks in ranks_at.items()]
    # A wrong collective may be answered by the others' next one, and only a later one waits.
    return f"\nwhere   waited in vain: {'; '.join(places)}; the cause is there or before"
