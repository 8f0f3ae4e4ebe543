"""Hugging Face: exports a run as a folder for transformers; starts a run from such a folder."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them.
COMMANDS = {
    "export": (".extras.export.folder:main", "export a folder that transformers loads", False),
}
# Group of settings -> its class with this extra.
SETTINGS = {"model": ".extras.export.export_settings:ImportedModel"}
INITIAL_WEIGHTS = ".extras.export.initial_weights:initialize"
