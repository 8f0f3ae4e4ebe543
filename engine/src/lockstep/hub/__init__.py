"""Hugging Face: folders that transformers loads, and weights from such folders.

Each public name is imported when it is first used. `lockstep.hub.gpt2` describes GPT-2.
"""

from typing import TYPE_CHECKING

from lockstep.lazy import lazily

if TYPE_CHECKING:
    from lockstep.hub.folder import refuse_occupied, run_command, write_export
    from lockstep.hub.layout import Layout, Weights
    from lockstep.hub.reading import weights_of_folder

__all__ = [
    "Layout",
    "Weights",
    "refuse_occupied",
    "run_command",
    "weights_of_folder",
    "write_export",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Layout": "lockstep.hub.layout:Layout",
        "Weights": "lockstep.hub.layout:Weights",
        "refuse_occupied": "lockstep.hub.folder:refuse_occupied",
        "run_command": "lockstep.hub.folder:run_command",
        "weights_of_folder": "lockstep.hub.reading:weights_of_folder",
        "write_export": "lockstep.hub.folder:write_export",
    },
)
