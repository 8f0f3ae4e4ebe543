"""Evidence: whether a change helps, from runs in pairs."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "compare": Command(".extras.evidence.compare:main", "train in pairs, and judge", False),
    "verify": Command(".extras.evidence.verify:main", "compute a run's steps again", False),
}
CALLBACKS = ".extras.evidence.replay_callbacks:callbacks"
