"""Predicts a run, checks the machines, breaks small runs on purpose, and sizes models."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "plan": Command(".extras.cluster.plan:main", "predict memory, time, and cost", True),
    "doctor": Command(".extras.cluster.doctor:main", "check if these machines can train", True),
    "drill": Command(".extras.cluster.drill:main", "break small runs to test recovery", True),
    "ledger": Command(".extras.cluster.step_ledger:main", "print what a step asks of a GPU", True),
    "size_law": Command(".extras.cluster.size_law:main", "fit the loss of model sizes", True),
}
SETTINGS = {"size": ".extras.cluster.size_settings:SizeSettings"}
ARGUMENTS = ".extras.cluster.by_size:with_rules"
CALLBACKS = ".extras.cluster.size_lines:callbacks"
