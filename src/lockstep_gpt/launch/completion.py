"""Answers a shell that completes an argument."""

import os

from lockstep_gpt import cli


def main(arguments: list[str]) -> int:
    """Print the names of commands, or let Hydra complete a command's overrides."""
    line = os.environ.get("COMP_LINE", "").split(" ")
    name = line[1] if len(line) > 1 else ""
    if len(line) < 3:
        names = [each for each in cli.COMMANDS if each.startswith(name) and each[0] != "-"]
        print(" ".join(names))
        return 0
    if name not in cli.COMMANDS or not cli.COMMANDS[name].overrides:
        return 0
    os.environ["COMP_LINE"] = " ".join([line[0], *line[2:]])
    return cli.main([name, "-sc", *arguments])
