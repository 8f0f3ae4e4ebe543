"""The last lines of a run that is done."""

import shlex
from pathlib import Path
from types import SimpleNamespace

from lightning import LightningDataModule

from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training.ending import last_lines, prompt_from


def test_a_shell_reads_the_next_commands_as_they_were_meant():
    trainer = SimpleNamespace(global_step=3, max_steps=3, loggers=[], callbacks=[])
    text = last_lines(RunDirectory(Path("it's a run")), trainer, {}, 0.0, "it's a")
    commands = [shlex.split(line) for line in text.partition("next\n")[2].splitlines()]
    assert [words[-3:] for words in commands if "generate" in words] == [
        ["it's a run", "--prompt", "it's a"]
    ]
    assert [words[-2:] for words in commands if "evaluate" in words] == [["evaluate", "it's a run"]]


def test_the_prompt_is_a_few_readable_words_of_the_validation_text(tmp_path):
    text = "Wörter, die folgen. " * 2000
    (tmp_path / "text.txt").write_text(text, "utf-8")
    folder = prepare(Text(path=str(tmp_path / "text.txt"), root=str(tmp_path / "data")))
    sizes = {"block_size": 64, "micro_size": 8, "accumulation": 1, "seed": 0}
    prompt = prompt_from(TokenDataModule(folder, **sizes), ByteTokenizer())
    assert len(prompt.split()) == 3
    assert prompt in text


def test_data_of_the_user_s_own_has_no_prompt():
    assert prompt_from(LightningDataModule(), ByteTokenizer()) == ""
    trainer = SimpleNamespace(global_step=3, max_steps=3, loggers=[], callbacks=[])
    assert "--prompt" not in last_lines(RunDirectory(Path("run")), trainer, {}, 0.0, "")
