"""Questions about the standard library, as a fine-tune reads them."""

import json

import pytest

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.conversations import messages_of
from lockstep_gpt.extras.chat.docstrings import main


@pytest.mark.slow
def test_questions_are_signatures_and_answers_first_sentences(tmp_path, capsys):
    path = tmp_path / "questions.jsonl"
    assert main([str(path)]) == 0
    lines = path.read_bytes().splitlines()
    talks = dict([message["content"] for message in messages_of(line, "a")] for line in lines)
    assert len(talks) == len(lines) > 3000
    assert talks["textwrap.dedent(text)"] == (
        "Remove any common leading whitespace from every line in `text`."
    )
    assert not any("\n" in text for pair in talks.items() for text in pair)
    assert f"{path}: {len(lines):,} questions about the standard library" in capsys.readouterr().out
    assert json.loads(lines[0]).keys() == {"prompt", "completion"}


@pytest.mark.parametrize("words", [[], ["a", "b"], ["--help"]])
def test_another_number_of_files_is_refused(words):
    with pytest.raises(UserError, match=r"give one file to write the questions to, such as"):
        main(words)


def test_a_file_that_cannot_be_written_is_one_line(command, python_of_forks):
    module = "lockstep_gpt.extras.chat.docstrings"
    status, _, err = command.run_words([python_of_forks, "-m", module, "no/such/folder/a.jsonl"])
    assert status == 1
    assert err.startswith("docstrings: ")
    assert err.count("\n") == 1
