"""The page on fine-tuning: its commands run one after another, as written but in small."""

import re
import shlex
from pathlib import Path

import pytest

FILE = Path(__file__).parents[3] / "docs/chat.md"
if not FILE.is_file():
    pytest.skip("no docs/chat.md here", allow_module_level=True)
PAGE = FILE.read_text(encoding="utf-8")
SMALL = ("max_steps=4", "val_every=4", "optim.warmup_steps=1", "logger=none", "launch.inline=true")
# What a command needs in small.
OTHERS = {
    "experiment=chat": ("batch.global_size=2", "data.val_tokens=512", "model.block_size=32"),
    "data=mixture": ("batch.global_size=2", "data.val_tokens=512", "model.block_size=32"),
    "run_dir=runs/base": ("experiment=smoke", "callbacks.sample.length=9"),
}


def blocks(language):
    code_blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text for word, text in code_blocks if word == language]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_commands_run_one_after_the_other(command, monkeypatch, capsys, python_of_forks):
    pytest.importorskip("transformers", reason="transformers is not installed")
    for line in "".join(blocks("")).splitlines():
        program, *words = shlex.split(line)
        if program == "python":
            status, _, err = command.run_words([python_of_forks, *words])
            assert status == 0, err
            continue
        if words[0] == "train":
            words += [*SMALL, f"data.root={command.data_root}"]
            words += [word for word in words for word in OTHERS.get(word, ())]
        command(*words)
    monkeypatch.chdir(command.folder)
    capsys.readouterr()
    exec(blocks("python")[0])
    output = capsys.readouterr().out
    assert output == "<|user|>textwrap.dedent(text)<|end|><|assistant|>\n"


def test_lines_of_json_are_conversations():
    from lockstep_gpt.extras.chat.conversations import messages_of

    talks = [messages_of(line.encode(), "page") for line in blocks("json")[0].splitlines()]
    assert len(talks) == 3
    assert talks[0] == talks[1] == talks[2]
