"""The tokenizer of the model to fine-tune, and the special tokens that it gets."""

import json

import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.template import OURS, markers_of, template_of
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer

ABSENT = "no such extra"
EXPORTED = "lockstep_gpt.extras.hub.exported_tokenizer"


def test_markers_are_the_last_ids_and_all_others_stay(folder, learned):
    made, size = chat_tokenizer(str(folder)), learned["vocab_size"]
    assert made.vocab_size == size + 4
    assert [markers_of(made)[marker] for marker in OURS] == [*range(size, size + 4)]
    text = "add 3 and <|user|>"
    assert max(made.encode(text)) < size
    assert made.decode(made.encode(text)) == text


def test_a_tokenizer_with_chatml_keeps_it(chatml, tmp_path):
    (tmp_path / "tokenizer.json").write_text(chatml.to_dict()["json"])
    made = chat_tokenizer(str(tmp_path))
    assert made.vocab_size == chatml.vocab_size
    assert made.decode([template_of(made).end]) == "<|im_end|>"


def test_a_run_gives_its_own_tokenizer_even_without_its_data(finished, tmp_path):
    command, _ = finished
    run = command.folder / "runs/first"
    assert chat_tokenizer(str(run)).to_dict() == ByteTokenizer().to_dict()
    values = (run / "config.yaml").read_text()
    elsewhere = tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text(values.replace("root: ", "root: /nowhere"))
    (elsewhere / "checkpoints").symlink_to(run / "checkpoints")
    assert chat_tokenizer(str(elsewhere)).to_dict() == ByteTokenizer().to_dict()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("{", "tokenizer.json cannot be read"),
        ('{"model": {"vocab": {"a": 0}}, "added_tokens": []}', "has no <|endoftext|>; choose"),
        ('{"model": {"vocab": {}}, "added_tokens": []}', "tokenizer.json cannot be read (max()"),
        ('{"model": {"vocab": {"</s>": 0}}, "added_tokens": []}', "tokenizer.json is damaged ("),
    ],
)
def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path, content, line):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError) as raised:
        chat_tokenizer(str(tmp_path))
    assert line in str(raised.value)


def test_a_name_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not bytes, a run, a checkpoint, or a folder with"):
        chat_tokenizer(str(tmp_path / "nothing"))


def test_numbers_are_no_chat(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "lockstep_gpt.extras.chat.tokenizers._values",
        lambda *_: {"kind": "numbers", "vocab_size": 9},
    )
    with pytest.raises(UserError, match="is of kind numbers, which is not for text; choose"):
        chat_tokenizer(str(tmp_path))


def test_an_exported_tokenizer_of_bytes_is_that(tmp_path):
    files = pytest.importorskip(EXPORTED, reason=ABSENT)
    content = files.as_files(ByteTokenizer(), 64)["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert chat_tokenizer(str(tmp_path)).to_dict() == ByteTokenizer().to_dict()
