"""Lines in the file `NOTES_FILE`; `notes.py` reads them."""

import os
import time


def note(event: str, step: int = 0) -> None:
    """Write a line."""
    line = f"{time.time():.6f} {os.getpid()} {event} {step}\n"
    file = os.open(os.environ["NOTES_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line.encode())
    os.close(file)
