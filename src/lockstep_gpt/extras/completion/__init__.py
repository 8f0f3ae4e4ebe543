"""Shell completion of commands, and of the overrides that Hydra knows."""

# name -> target, help line, whether it accepts Hydra overrides; `cli.py` collects them. Hydra's
# shell script, which `train -sc install=bash` prints, calls this command.
COMMANDS = {
    "-sc": (".extras.completion.answers:main", "complete words in the shell", False),
}
