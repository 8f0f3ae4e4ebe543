"""Shows a run: its gradients, what their average says about the batch, reports, evaluation."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "panel": (".extras.seeing.panel:main", "show a run's all-reduces on an HTML page", False),
    "report": (
        ".extras.seeing.run_report:main",
        "make a report of a run, or compare several",
        False,
    ),
    "evaluate": (".extras.seeing.evaluate:main", "measure the loss on all validation text", False),
}
NEXT = "evaluate"  # of the commands, what to type when a run has ended
MOVED = {"lockstep_gpt.seeing": "lockstep_gpt.extras.seeing"}
