"""To and from Hugging Face: a run as a folder for transformers, a run that starts from one."""

# name -> target, meaning, whether it takes Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "export": (".extras.export.folder:main", "a folder that transformers loads", False),
}
# Group of settings -> what it takes with this extra.
SETTINGS = {"model": ".extras.export.export_settings:ImportedModel"}
INITIAL_WEIGHTS = ".extras.export.initial_weights:initialize"
