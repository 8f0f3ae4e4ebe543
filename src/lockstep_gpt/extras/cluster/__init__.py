"""Predicts a run, checks the machines, and breaks small runs on purpose."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "plan": Command(".extras.cluster.plan:main", "predict memory, time, and cost", True),
    "doctor": Command(".extras.cluster.doctor:main", "check if these machines can train", True),
    "drill": Command(".extras.cluster.drill:main", "break small runs to test recovery", True),
}
