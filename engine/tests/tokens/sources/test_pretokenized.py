import hashlib
import json
import uuid
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep_gpt import generate
from lockstep_gpt.evaluate import of_split

from lockstep.checkpoints.reading import find_checkpoint, read_checkpoint
from lockstep.errors import UserError
from lockstep.evaluation.command import configuration
from lockstep.tokens import tokenizer_choice
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources import pretokenized as module
from lockstep.tokens.sources.pretokenized import RandomTokens, TokenFiles
from lockstep.tokens.sources.source import Position
from lockstep.tokens.tokenizer import NumberTokenizer
from lockstep.tokens.tokenizer_choice import from_dict

IDS = np.random.default_rng(0).integers(50_257, size=5000)
MAGIC = {"<u2": 20240520, "<u4": 20240801}


def corpus(path, **changes):
    return TokenFiles(path=str(path), **changes)


def blocks(source, start=None):
    return list(source.blocks(start or Position()))


def tokens(source):
    return [token for block in blocks(source) for token in block.ids.tolist()]


def split(source, name):
    return np.concatenate([block.ids for block in blocks(source) if block.split == name])


def flat(documents):
    return list(chain.from_iterable(documents))


def write(path, ids, dtype="<u2", header=True):
    words = np.zeros(256, "<i4")
    words[:3] = MAGIC[dtype], 1, len(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(words.tobytes() * header + np.asarray(ids).astype(dtype).tobytes())
    return path


# Both formats


def write_plain(folder, documents):
    return write(folder / "t.bin", flat(documents), header=False)


def write_headed(folder, documents):
    return write(folder / "t.bin", flat(documents))


WRITERS = (write_plain, write_headed)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=30), max_size=12),
    stretch=st.integers(1, 40),
)
def test_any_documents_are_read_back_and_reading_resumes_at_any_block(writer, documents, stretch):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STRETCH", stretch)
        source = corpus(writer(Path(folder), documents), val_fraction=0.3, test_fraction=0.1)
        all_blocks = blocks(source)
        assert tokens(source) == flat(documents)
        for number, block in enumerate(all_blocks):
            rest = blocks(source, block.after)
            assert [
                (block.after, block.split, block.documents, block.ids.tolist()) for block in rest
            ] == [
                (block.after, block.split, block.documents, block.ids.tolist())
                for block in all_blocks[number + 1 :]
            ]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_format_is_read_from_a_server(tmp_path, writer):
    documents = [IDS[:100].tolist(), IDS[100:150].tolist()]
    path = writer(tmp_path, documents)
    root = f"/{uuid.uuid4()}"
    system = fsspec.filesystem("memory")
    for file in tmp_path.iterdir():
        system.pipe(f"{root}/{file.name}", file.read_bytes())
    name = f"/{path.name}" if path.is_file() else ""
    assert tokens(corpus(f"memory:/{root}{name}")) == IDS[:150].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_or_folder_is_read_over_http_through_a_cut(
    serving, tmp_path, writer, parts, is_folder
):
    name = writer(tmp_path, [IDS.tolist()]).name
    with serving(tmp_path, parts=parts) as (url, faults):
        source = corpus(f"{url}/{'' if is_folder else name}")
        assert source.size >= IDS.size * 2
        faults.cuts = [77]
        assert tokens(source) == IDS.tolist()
        assert not faults.cuts


def test_formats_mix_in_one_folder_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "c/a.bin", IDS[20:30], "<u4")
    write(tmp_path / "a.bin", IDS[:10])
    write(tmp_path / "b.bin", IDS[10:20], header=False)
    write(tmp_path / "d.bin", IDS[30:40], header=False)
    assert tokens(corpus(tmp_path)) == IDS[:40].tolist()


# Plain tokens, and tokens after a header


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_tokens_come_in_order_with_and_without_a_header(tmp_path, header, name, dtype):
    write(tmp_path / "b.bin", IDS[3000:], dtype, header)
    write(tmp_path / "a.bin", IDS[:3000], dtype, header)
    source = corpus(tmp_path, dtype=name if not header else "uint16")
    np.testing.assert_array_equal(tokens(source), IDS)


def test_a_file_for_validation_is_held_out(tmp_path):
    train, val = write(tmp_path / "t.bin", IDS), write(tmp_path / "v/v.bin", IDS[:77])
    source = corpus(train, val_path=str(val))
    np.testing.assert_array_equal(split(source, "train"), IDS)
    np.testing.assert_array_equal(split(source, "val"), IDS[:77])


def test_without_a_validation_file_stretch_ends_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STRETCH", 1000)
    source = corpus(write(tmp_path / "t.bin", IDS[:4500]), val_fraction=0.1)
    stretches = np.split(IDS[:4500], [1000, 2000, 3000, 4000])
    ends = [len(stretch) - len(stretch) // 10 for stretch in stretches]
    expected = np.concatenate([stretch[end:] for stretch, end in zip(stretches, ends, strict=True)])
    np.testing.assert_array_equal(split(source, "val"), expected)
    assert split(source, "train").size == 4050


@pytest.mark.parametrize("val", [None, "v.bin"])
def test_reading_resumes_at_any_block_of_several_files(tmp_path, monkeypatch, val):
    monkeypatch.setattr(module, "STRETCH", 1000)
    for name in ("a.bin", "b.bin", "v.bin"):
        write(tmp_path / name, IDS)
    source = corpus(tmp_path / "[ab].bin", val_path=val and str(tmp_path / val))
    all_blocks = blocks(source)
    assert len(all_blocks) >= 15
    for number, block in enumerate(all_blocks):
        rest = blocks(source, block.after)
        assert [block.after for block in rest] == [
            block.after for block in all_blocks[number + 1 :]
        ]
        assert [block.ids.tolist() for block in rest] == [
            block.ids.tolist() for block in all_blocks[number + 1 :]
        ]


@pytest.mark.parametrize("place", ["", "t.bin", "*.bin"])
def test_the_identity_of_plain_files_is_their_names_and_content(tmp_path, place):
    path = write(tmp_path / "t.bin", IDS)
    source = corpus(tmp_path / place, val_path=str(path))
    expected = [["t.bin", hashlib.sha256(path.read_bytes()).hexdigest()]]
    assert source.identity() == [expected, expected]
    assert source.size == 2 * path.stat().st_size


@pytest.mark.parametrize("header", [False, True])
def test_a_truncated_file_is_one_clear_line(tmp_path, header):
    path = write(tmp_path / "t.bin", IDS, header=header)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"t\.bin of the corpus has [\d,]+ bytes, but .*download"):
        blocks(corpus(path))


def test_a_header_that_counts_other_tokens_is_one_clear_line(tmp_path):
    path = write(tmp_path / "t.bin", IDS)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"11,022 bytes, but 11,024 with the 5,000 tokens of its h"):
        blocks(corpus(path))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_token_above_the_vocabulary_is_rejected_by_name(tmp_path, writer):
    path = writer(tmp_path, [[1, 2], [300]])
    size = r"data\.source\.vocab_size=300"
    line = rf"\.bin of the corpus has the token 300, but {size}; raise it, or change d"
    with pytest.raises(UserError, match=line):
        blocks(corpus(path, vocab_size=300))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("a.txt", "use data=text"),
        ("a.json", "use data=jsonl"),
        ("a.JSONL", "use data=jsonl"),
        ("a.jsonl.gz", "use data=jsonl"),
        ("a.parquet", "use data=parquet"),
        ("a.npy", r"save its array with tofile\(\)"),
        ("a.bin.zst", "unpack it"),
        ("readme.md", "remove it, or name the token files alone"),
        ("t.idx", "remove it, or name the token files alone"),
        ("tokens", "remove it, or name the token files alone"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_file_that_is_not_of_tokens_is_refused_by_name(tmp_path, name, remedy, alone):
    (tmp_path / name).write_bytes(b"even")
    if not alone:
        write(tmp_path / "t.bin", IDS)
    with pytest.raises(UserError, match=rf"{name} is not a token file, .*; {remedy}"):
        blocks(corpus(tmp_path))


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^data\.source\.path=.* matches no file; give a file"):
        blocks(corpus(tmp_path))


# Prepared folders


@pytest.mark.parametrize("writer", WRITERS)
def test_prepared_tokens_are_those_of_the_files(tmp_path, writer):
    train = writer(tmp_path / "t", [IDS[:2000].tolist(), IDS[2000:].tolist()])
    val = write(tmp_path / "v.bin", IDS[:99])
    folder = prepare(corpus(train, val_path=str(val), root=str(tmp_path / "data")))
    np.testing.assert_array_equal(open_split(folder, "train"), IDS)
    np.testing.assert_array_equal(open_split(folder, "val"), IDS[:99])
    assert load_index(folder).tokenizer["vocab_size"] == 50_257


@pytest.fixture
def tokenizer(tmp_path):
    """A small byte-level BPE, in a file."""
    pytest.importorskip("tokenizers")
    made = tokenizer_choice.make_tokenizer("bpe", 300, ["some words and some more words"])
    (tmp_path / "tokenizer.json").write_text(made.to_dict()["json"])
    return made


def test_the_tokenizer_is_saved_with_the_tokens(tmp_path, tokenizer):
    ids = tokenizer.encode("some more words")
    source = corpus(
        write(tmp_path / "t.bin", np.tile(ids, 99)),
        tokenizer=str(tmp_path / "tokenizer.json"),
        vocab_size=tokenizer.vocab_size,
        root=str(tmp_path / "data"),
    )
    folder = prepare(source)
    known = tokenizer_choice.from_dict(load_index(folder).tokenizer)
    assert known.decode(open_split(folder, "train")[: len(ids)]) == "some more words"


def test_a_tokenizer_of_another_size_is_rejected(tmp_path, tokenizer):
    source = corpus(write(tmp_path / "t.bin", IDS), tokenizer=str(tmp_path / "tokenizer.json"))
    size = r"data\.source\.vocab_size="
    line = rf"{size}50257 is not that of .*; set {size}{tokenizer.vocab_size}"
    with pytest.raises(UserError, match=line):
        source.make_tokenizer()


# Damage


def flipped(path, seed):
    """Flip bits of a file, mostly near its start, where headers are, or cut it off."""
    draw = np.random.default_rng(seed)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 8])):
        place = draw.integers(min(len(content), draw.choice([60, len(content)])))
        content[place] ^= 1 << draw.integers(8)
    end = draw.choice([len(content), draw.integers(len(content))], p=[0.9, 0.1])
    path.write_bytes(content[:end])


def fault_of(source):
    """Return the line that reading ends with; None: it succeeds."""
    try:
        tokens(source)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("writer", WRITERS)
def test_damaged_files_are_read_or_named_in_one_line(tmp_path, writer):
    for seed in range(40):
        folder = tmp_path / str(seed)
        writer(folder, [range(20), range(5, 300), range(40)])
        files = sorted(folder.iterdir())
        flipped(files[seed % len(files)], seed)
        line = fault_of(corpus(folder))
        assert line is None or "\n" not in line
        assert line is None or any(str(path) in line for path in files)


def test_another_vocabulary_for_prepared_numbers_is_refused(tmp_path):
    path = write(tmp_path / "t.bin", IDS % 600)
    settings = {"vocab_size": 600, "root": str(tmp_path / "data")}
    folder = prepare(corpus(path, **settings))
    assert prepare(corpus(path, **settings)) == folder
    other = corpus(path, **settings | {"vocab_size": 700})
    size = r"data\.source\.vocab_size="
    rule = rf"^{size}700: {folder} was prepared with 600; set {size}600, or "
    with pytest.raises(UserError, match=rule):
        prepare(other)
    other.fingerprint = load_index(folder).fingerprint  # as in a run from before this check
    assert prepare(other) == folder


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
