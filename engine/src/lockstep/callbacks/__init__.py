"""Lightning callbacks: each takes part in a run by itself.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.callbacks.environment import RecordEnvironment

__all__ = [
    "RecordEnvironment",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "RecordEnvironment": "lockstep.callbacks.environment:RecordEnvironment",
    },
)
