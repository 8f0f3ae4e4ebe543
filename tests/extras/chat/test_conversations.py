"""Conversations from files: the common forms, and one line for each mistake."""

import json
import logging
import re

import pytest

from lockstep_gpt.data import shards
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import open_split
from lockstep_gpt.data.sources.source import Position
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.conversations import Conversations, messages_of
from lockstep_gpt.extras.chat.template import template_of

HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
FORMS = {
    "messages": {"messages": HELLO},
    "conversations": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
    },
    "prompt": {"prompt": "Hi", "completion": "Yes?"},
    "prompt of messages": {"prompt": HELLO[:1], "completion": HELLO[1:]},
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_the_same_conversation(form):
    assert messages_of(json.dumps(FORMS[form]).encode(), "a:1") == HELLO


MISTAKES = {
    '{"messages": [': "is not JSON (Expecting value at column 15); write one object",
    "[]": "is not an object with messages, conversations, or prompt and completion; name its",
    '{"text": "Hi"}': "is not an object with messages, conversations, or prompt and completion;",
    '{"messages": []}': "is an empty conversation; add one, or remove the line",
    '{"messages": "Hi"}': "has messages that are not a list of objects; write them so",
    '{"messages": [{"role": "tool", "content": ""}]}': "role 'tool' is not one of system, user,",
    '{"messages": [{"content": ""}]}': "role None is not one of system, user, assistant; rename",
    '{"messages": [{"role": ["user"], "content": ""}]}': "role ['user'] is not one of system,",
    '{"messages": [{"role": "user", "content": "Hi"}]}': "has no answer by the assistant; add one",
    '{"messages": [{"role": "user", "content": null}]}': "has a message whose content is not text",
    '{"prompt": 3, "completion": ""}': "has a message whose prompt is not text; write it as a",
    '{"prompt": "\\u0000", "completion": ""}': "has a message with a NUL, which ends a document",
    "[" * 100_000: "is not JSON (",
}


@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line[:40])
def test_a_mistake_is_one_line_with_file_and_number(line, tmp_path):
    good = json.dumps(FORMS["prompt"])
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n{good}\n")
    corpus = Conversations(path=str(tmp_path))
    with pytest.raises(UserError, match=re.escape(f"a.jsonl:3 {MISTAKES[line]}")) as raised:
        list(corpus.blocks(Position()))
    assert "\n" not in str(raised.value)


def test_text_in_another_encoding_is_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "é", "completion": ""}', encoding="latin-1")
    with pytest.raises(UserError, match=r"a\.jsonl:1 is not UTF-8; save the file as UTF-8"):
        list(Conversations(path=str(tmp_path)).blocks(Position()))


def test_a_folder_gives_its_files_of_conversations_only(tmp_path):
    (tmp_path / "README.md").write_text("about them")
    with pytest.raises(UserError, match=r"has no file \*\.jsonl, \*\.ndjson, \*\.json; give one"):
        _ = Conversations(path=str(tmp_path)).files
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.json").write_text("")
    corpus = Conversations(path=str(tmp_path))
    assert [file.name for file in corpus.files] == ["a.jsonl", "b.json"]


def prepared(path, tmp_path, **settings):
    folder = prepare(Conversations(path=str(path), root=str(tmp_path / "data"), **settings))
    return shards.load_index(folder), {
        split: open_split(folder, split).tolist() for split in ("train", "val")
    }


def test_nothing_is_lost_and_each_conversation_is_a_document(questions, tmp_path):
    index, tokens = prepared(questions, tmp_path, val_fraction=0.1)
    template = template_of(ByteTokenizer())
    lines = questions.read_bytes().splitlines()
    expected = {(*template.render(messages_of(line, "a"), False), 0) for line in lines}
    result = [
        (*document, 0) for ids in tokens.values() for document in bytes(ids).split(b"\0")[:-1]
    ]
    assert len(result) == len(lines) == sum(split.documents for split in index.splits.values())
    assert {*result} == expected
    assert index.tokenizer == ByteTokenizer().to_dict()


def test_a_longer_conversation_is_cut_at_its_end_and_counted(questions, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with questions.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"prompt": "Hi", "completion": "a" * 99}))
    _, tokens = prepared(questions, tmp_path, longest=40)
    documents = bytes(tokens["train"] + tokens["val"]).split(b"\0")
    assert max(map(len, documents)) == 40
    assert b"\xf9Hi\xfb\xfa" + b"a" * 35 in documents
    assert f"{questions}: 1 of 901 conversations are cut at the end, after" in caplog.text


def test_half_a_surrogate_pair_does_not_end_the_build(tmp_path):
    path = tmp_path / "a.jsonl"
    more = "".join(f'{{"prompt": "{n}", "completion": ""}}\n' for n in range(9))
    path.write_text(f'{{"prompt": "\\ud83d", "completion": "ok"}}\n{more}')
    _, tokens = prepared(path, tmp_path, val_fraction=0.5)
    assert b"\xf9?\xfb\xfaok\xfb\0" in bytes(tokens["train"] + tokens["val"])


def test_other_tokens_are_another_fingerprint(questions, tmp_path, folder):
    result = {
        prepared(questions, tmp_path, **settings)[0].fingerprint
        for settings in ({}, {"longest": 30}, {"tokenizer": str(folder)})
    }
    assert len(result) == 3
