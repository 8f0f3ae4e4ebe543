"""Measures a trained module on held-out data, and a language model on any text or on tasks.

Each public name is imported when it is first used.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.evaluation.command import evaluate, newest, parsed, parser_of, show
    from lockstep.evaluation.measure import Trained, of_text
    from lockstep.evaluation.tasks import Tasks

__all__ = [
    "Tasks",
    "Trained",
    "evaluate",
    "newest",
    "of_text",
    "parsed",
    "parser_of",
    "show",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Tasks": "lockstep.evaluation.tasks:Tasks",
        "Trained": "lockstep.evaluation.measure:Trained",
        "evaluate": "lockstep.evaluation.command:evaluate",
        "newest": "lockstep.evaluation.command:newest",
        "of_text": "lockstep.evaluation.measure:of_text",
        "parsed": "lockstep.evaluation.command:parsed",
        "parser_of": "lockstep.evaluation.command:parser_of",
        "show": "lockstep.evaluation.command:show",
    },
)
