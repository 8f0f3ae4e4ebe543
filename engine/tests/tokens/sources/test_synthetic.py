import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lockstep_gpt import generate
from lockstep_gpt.evaluate import of_split

from lockstep.checkpoints.reading import find_checkpoint, read_checkpoint
from lockstep.errors import UserError
from lockstep.evaluation.command import configuration
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import open_split
from lockstep.tokens.sources.source import Position
from lockstep.tokens.sources.synthetic import RandomTokens
from lockstep.tokens.tokenizer import NumberTokenizer
from lockstep.tokens.tokenizer_choice import from_dict


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("vocab_size", 1, "must be at least 2"),
        ("vocab_size", 65_537, "must be at most 65536"),
        ("tokens", 0, "must be at least 1"),
    ],
)
def test_an_error_is_the_setting_as_typed_and_its_rule_in_one_line(name, value, rule):
    with pytest.raises(UserError, match=f"^{name}={value} {rule}$"):
        RandomTokens(**{name: value})


def random_tokens(**settings):
    blocks = list(RandomTokens(**settings).blocks(Position()))
    return {
        name: np.concatenate([block.ids for block in blocks if block.split == name])
        for name in {block.split: None for block in blocks}
    }


def test_random_tokens_fill_both_splits_exactly():
    splits = random_tokens(tokens=600_001, val_fraction=0.25)
    assert (splits["train"].size, splits["val"].size) == (450_001, 150_000)


def test_a_test_split_is_the_end_of_the_same_tokens():
    two = random_tokens(tokens=600_001, val_fraction=0.25)
    three = random_tokens(tokens=600_001, val_fraction=0.25, test_fraction=0.1)
    assert [ids.size for ids in three.values()] == [390_001, 150_000, 60_000]
    assert [*three] == ["train", "val", "test"]
    assert [*two] == ["train", "val"]
    together = (np.concatenate([*splits.values()]) for splits in (two, three))
    np.testing.assert_array_equal(*together)


def test_random_tokens_are_the_same_everywhere():
    splits = random_tokens(vocab_size=50_257, tokens=100, val_fraction=0.5)
    assert splits["train"][:6].tolist() == [565, 5111, 22830, 10751, 46179, 42335]
    assert splits["val"][:6].tolist() == [44237, 10835, 15193, 35073, 44428, 23067]


@pytest.mark.parametrize("vocab_size", [2, 100, 256])
def test_random_tokens_are_uniform(vocab_size):
    train = random_tokens(vocab_size=vocab_size, tokens=200_000, val_fraction=0.01)["train"]
    counts = np.bincount(train, minlength=vocab_size)
    assert counts.size == vocab_size
    expected, freedom = train.size / vocab_size, vocab_size - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_random_tokens_resume_at_any_block():
    source = RandomTokens(tokens=900_001, val_fraction=0.25, test_fraction=0.1)
    all_blocks = list(source.blocks(Position()))
    for number, block in enumerate(all_blocks):
        rest = list(source.blocks(block.after))
        assert [block.after for block in rest] == [
            block.after for block in all_blocks[number + 1 :]
        ]
        for block, expected in zip(rest, all_blocks[number + 1 :], strict=True):
            np.testing.assert_array_equal(block.ids, expected.ids)


def test_random_tokens_are_below_the_vocabulary_in_both_splits(tmp_path):
    config = RandomTokens(root=str(tmp_path), vocab_size=300, tokens=1000, val_fraction=0.1)
    folder = prepare(config)
    train, val = open_split(folder, "train"), open_split(folder, "val")
    assert (train.size, val.size) == (900, 100)
    assert 250 < max(train.max(), val.max()) < 300


def test_the_command_says_that_random_tokens_are_not_documents(command, tmp_path):
    words = ["prepare", "data=synthetic", f"data.root={tmp_path / 'data'}"]
    assert command(*words).stdout.startswith("prepared synthetic -> ")
    assert command(*words).stdout.startswith("found synthetic -> ")
    assert command(*words, "--verify").stdout.startswith("verified synthetic -> ")


@given(st.lists(st.integers(0, 50_256)))
def test_numbers_encode_inverts_decode(ids):
    tokenizer = NumberTokenizer(50_257)
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids


@pytest.mark.parametrize("word", ["10", "-1", "x", "1.0", "²", "٣"])
def test_numbers_reject_invalid_tokens(word):
    with pytest.raises(UserError, match="0 to 9"):
        NumberTokenizer(10).encode(f"3 {word}")


def test_a_tokenizer_survives_json():
    made = NumberTokenizer(1000)
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert type(again) is type(made)
    assert again.to_dict() == made.to_dict()
    assert (again.vocab_size, again.end_of_text) == (made.vocab_size, made.end_of_text)
    assert again.encode("1 2").tolist() == made.encode("1 2").tolist()


@pytest.fixture(scope="module")
def number_run(saved_run, tmp_path_factory):
    data = {"root": str(tmp_path_factory.mktemp("data")), "vocab_size": 30, "tokens": 10_000}
    return saved_run(NumberTokenizer(30), source="synthetic", val_fraction=0.2, **data)


def test_a_model_of_numbers_continues_numbers(number_run, capsys):
    run = number_run
    assert generate.main([str(run), "--prompt", "3 29", "--length", "4"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:2] == ["3", "29"]
    assert len(words) == 6
    assert all(int(word) < 30 for word in words)
    with pytest.raises(UserError, match="'def' is not a token of this model"):
        generate.main([str(run), "--prompt", "def"])


def test_numbers_are_not_counted_as_bytes(number_run):
    path = find_checkpoint(number_run)
    content = read_checkpoint(path)
    result = of_split(configuration(path, content), path, content)
    assert result["tokens"] == 1984
    assert "bits_per_byte" not in result
