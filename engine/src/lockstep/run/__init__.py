"""One run: its directory, lock, frozen configuration, and end.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.run.directory import literal, settled
    from lockstep.run.source_code import tell_changes
    from lockstep.run.trust import refuse_foreign

__all__ = [
    "literal",
    "refuse_foreign",
    "settled",
    "tell_changes",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "literal": "lockstep.run.directory:literal",
        "refuse_foreign": "lockstep.run.trust:refuse_foreign",
        "settled": "lockstep.run.directory:settled",
        "tell_changes": "lockstep.run.source_code:tell_changes",
    },
)
