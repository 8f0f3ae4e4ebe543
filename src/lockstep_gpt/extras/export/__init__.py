"""To and from Hugging Face: a run as a folder for transformers, a run that starts from one."""

# name -> target, meaning, whether it takes Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "export": (".extras.export.folder:main", "a folder that transformers loads", False),
}
INITIAL_WEIGHTS = ".extras.export.initial_weights:initialize"
