"""A shell completes the commands, and what Hydra knows of their overrides."""

# name -> target, meaning, whether it takes Hydra overrides; `cli.py` collects them. Hydra's script
# for the shell, which `train -sc install=bash` prints, calls this one.
COMMANDS = {
    "-sc": (".extras.completion.answers:main", "answer a shell that completes words", False),
}
