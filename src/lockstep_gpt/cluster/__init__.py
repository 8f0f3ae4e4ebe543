"""Before the run: `plan` predicts, `doctor` examines, `drill` breaks runs here on purpose."""

# name -> target, meaning, whether it takes Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "plan": (
        "lockstep_gpt.cluster.plan:main",
        "memory, time and cost on any devices",
        True,
    ),
    "doctor": (
        "lockstep_gpt.cluster.doctor:main",
        "are these machines fit to train on?",
        True,
    ),
    "drill": (
        "lockstep_gpt.cluster.drill:main",
        "break runs here on purpose, and see",
        True,
    ),
}
