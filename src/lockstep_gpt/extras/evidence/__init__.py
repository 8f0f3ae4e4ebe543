"""Evidence: whether a change helps, from runs in pairs."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "compare": Command(".extras.evidence.compare:main", "train settings in pairs, and judge", False)
}
