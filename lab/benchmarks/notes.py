"""What the processes of a run note with the modules in `clock/`."""

from pathlib import Path
from typing import NamedTuple

CLOCK = Path(__file__).parent / "clock"  # for PYTHONPATH


class Note(NamedTuple):
    """A line of a process."""

    at: float  # seconds since 1970
    pid: int
    event: str  # >FUNCTION: entered; <FUNCTION: left; step
    step: int  # the optimizer step that has ended; 0 of a function


def read_notes(path: Path) -> list[Note]:
    """Return the complete lines of a file of notes."""
    if not path.exists():
        return []
    fields = (line.split() for line in path.read_text().rpartition("\n")[0].splitlines())
    return [Note(float(at), int(pid), event, int(step)) for at, pid, event, step in fields]
