"""Shows a run: its gradients, what their average says about the batch, reports, evaluation."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "panel": (".extras.seeing.panel:main", "show a run's all-reduces on an HTML page", False),
    "report": (
        ".extras.seeing.run_report:main",
        "make a report of a run, or compare several",
        False,
    ),
}
MOVED = {"lockstep_gpt.seeing": "lockstep_gpt.extras.seeing"}
