"""Conversations in files, and a byte-pair tokenizer with special tokens for them."""

import json

import pytest

from lockstep_gpt.data.tokenizer import END_OF_TEXT
from lockstep_gpt.data.tokenizer_choice import from_dict

PAIRS = [(f"add {a} and {b}", f"{a} + {b} = {a + b}") for a in range(30) for b in range(30)]


@pytest.fixture
def questions(tmp_path):
    """A file with 900 questions and answers."""
    path = tmp_path / "questions.jsonl"
    lines = [json.dumps({"prompt": question, "completion": answer}) for question, answer in PAIRS]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def learned():
    """The values of a byte-level BPE without special tokens for a chat."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    texts = [" ".join(pair) for pair in PAIRS]
    made.train_from_iterator(texts, 300, special_tokens=[END_OF_TEXT], show_progress=False)
    return {"kind": "bpe", "vocab_size": made.get_vocab_size(), "end_of_text": 0} | {
        "json": made._tokenizer.to_str()
    }


@pytest.fixture
def folder(learned, tmp_path):
    """A folder with this tokenizer as transformers saves it."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    (path / "tokenizer.json").write_text(learned["json"], encoding="utf-8")
    return path


@pytest.fixture
def chatml(learned):
    """The tokenizer with ChatML's special tokens."""
    content = json.loads(learned["json"])
    size = learned["vocab_size"]
    form = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": size + place, "content": marker, "special": True, **form}
        for place, marker in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    return from_dict({**learned, "vocab_size": size + 2, "json": json.dumps(content)})
