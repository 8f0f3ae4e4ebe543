"""Hugging Face: exports a run as a folder for transformers; starts a run from such a folder."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "export": Command(".extras.hub.folder:main", "export a folder that transformers loads", False),
}
