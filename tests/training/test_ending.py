"""The last lines of a run that is done."""

import shlex
from pathlib import Path
from types import SimpleNamespace

from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training.ending import last_lines


def test_a_shell_reads_the_next_commands_as_they_were_meant():
    trainer = SimpleNamespace(global_step=3, max_steps=3, max_epochs=-1, loggers=[], callbacks=[])
    text = last_lines(RunDirectory(Path("it's a run")), trainer, {}, 0.0, "it's a")
    commands = [shlex.split(line) for line in text.partition("next\n")[2].splitlines()]
    assert [words[-3:] for words in commands if "generate" in words] == [
        ["it's a run", "--prompt", "it's a"]
    ]
    assert [words[-2:] for words in commands if "evaluate" in words] == [["evaluate", "it's a run"]]


def test_without_a_prompt_the_next_commands_have_none():
    trainer = SimpleNamespace(global_step=3, max_steps=3, max_epochs=-1, loggers=[], callbacks=[])
    assert "--prompt" not in last_lines(RunDirectory(Path("run")), trainer, {}, 0.0, "")
