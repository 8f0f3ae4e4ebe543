"""Task files, and a saved model."""

import json

import pytest

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.run.checkpoint import find_checkpoint
from lockstep_gpt.run.trained_model import load_model

CHOICES = [
    {"context": "def f(x):", "choices": [" return", " café", "\n    pass"], "answer": 2},
    {"context": "import", "choices": [" os", " zzz", "?"], "answer": 0},
    {"context": "x = ", "choices": ["1\n", "[1, 2]\n"], "answer": 1},
    {"context": "", "choices": ["if", "of"], "answer": 0},
    {"context": "a" * 100, "choices": ["aaa", "b"], "answer": 0},
]
CLOZE = [
    {"context": "aaaa", "target": "a"},
    {"context": "return ", "target": "None"},
    {"id": 3, "context": "b", "target": "é"},
]
EXACT = [
    {"context": "2 + 2 = ", "target": "4", "until": "\n"},
    {"context": "x", "target": "yz", "until": ["\n", " "]},
]
KINDS = {"pick": CHOICES, "fill": CLOZE, "sum": EXACT}


@pytest.fixture
def write(tmp_path):
    """Write a JSON Lines file, of values or of raw bytes, and return its path."""

    def file(name, lines):
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in content))
        return tmp_path / name

    return file


@pytest.fixture
def files(write):
    """One file of each kind."""
    return [str(write(f"{name}.jsonl", lines)) for name, lines in KINDS.items()]


@pytest.fixture(scope="session")
def trained(saved_run):
    """A run directory with a checkpoint."""
    return saved_run(ByteTokenizer(), source="stdlib")


@pytest.fixture(scope="session")
def model(trained):
    return load_model(find_checkpoint(trained))[0]
