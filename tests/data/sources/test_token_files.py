import json
import struct
import uuid
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep_gpt.data import tokenizer_choice
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import load_index, open_split
from lockstep_gpt.data.sources import token_files
from lockstep_gpt.data.sources.source import Position
from lockstep_gpt.data.sources.token_files import TokenFiles
from lockstep_gpt.errors import UserError

IDS = np.random.default_rng(0).integers(50_257, size=5000)
MAGIC = {"<u2": 20240520, "<u4": 20240801}
MEGATRON = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
TENSORS = {"u1": 11, "<i2": 14, "<i4": 16, "<i8": 18, "<u2": 20, "<f4": 1}
ARRAYS = {"i1": 0, "<i2": 1, "<i4": 2, "<i8": 3, "u1": 4, "<u2": 5, "<u4": 6, "<u8": 7}


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


def index_of(lengths, dtype, ends=None, version=1, magic=b"MMIDIDX\0\0", modes=b""):
    """Return Megatron-LM's index; by default, each sequence is a document."""
    places = np.cumsum([0, *lengths], dtype="<i8")[:-1] * np.dtype(dtype).itemsize
    indices = np.array([*range(len(lengths) + 1)] if ends is None else [0, *ends], "<i8")
    start = struct.pack("<9sQBQQ", magic, version, MEGATRON[dtype], len(lengths), len(indices))
    return start + np.array(lengths, "<i4").tobytes() + places.tobytes() + indices.tobytes() + modes


def write_pair(path, documents, dtype="<u2", **changes):
    """Write a `.bin` file and Megatron-LM's index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    together = np.concatenate([np.array(document, dtype) for document in [[], *documents]]).astype(
        dtype
    )
    path.write_bytes(together.tobytes())
    path.with_suffix(".idx").write_bytes(index_of([*map(len, documents)], dtype, **changes))
    return path


def write_lit_data(folder, chunks, dtype="<i4", kind="tensor", **config):
    """Write litData's folder; a chunk is a list of items, and an item a list of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, items in enumerate(chunks):
        bodies = [np.array(item, dtype).tobytes() for item in items]
        offsets = np.cumsum([4 * (len(items) + 2), *map(len, bodies)]).astype("<u4")
        content = struct.pack("<I", len(items)) + offsets.tobytes() + b"".join(bodies)
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(content)
        entries.append(
            {
                "chunk_bytes": len(content),
                "chunk_size": len(items),
                "dim": sum(map(len, items)),
                "filename": name,
            }
        )
    codes = {"tensor": TENSORS, "numpy": ARRAYS}[kind]
    known = {
        "compression": None,
        "encryption": None,
        "data_format": [f"no_header_{kind}:{codes[dtype]}"],
        "item_loader": "TokensLoader",
        **config,
    }
    text = json.dumps({"chunks": entries, "config": known, "updated_at": "0"}, sort_keys=True)
    (folder / "index.json").write_text(text)
    return folder


def write_datatrove(path, documents, size=2, **beside):
    """Write a `.ds` file and, beside it, the ends of documents and the metadata of datatrove."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = flat(documents)
    ends = np.cumsum([len(document) for document in documents])
    contents = {
        "": np.array(ids, f"<u{size}").tobytes(),
        ".index": ends.astype("<u8").tobytes(),
        ".metadata": f"gpt2|{size}\n{len(ids)}\n{len(ids)} T".encode(),
        **{f".{name}": content for name, content in beside.items()},
    }
    for ending, content in contents.items():
        if content is not None:
            path.with_name(path.name + ending).write_bytes(content)
    return path


# All formats


def write_plain(folder, documents):
    return write(folder / "t.bin", flat(documents), header=False)


def write_headed(folder, documents):
    return write(folder / "t.bin", flat(documents))


def write_megatron(folder, documents):
    return write_pair(folder / "t.bin", documents)


def write_lit(folder, documents):
    middle = len(documents) // 2
    return write_lit_data(folder, [documents[:middle], documents[middle:]])


def write_ds(folder, documents):
    return write_datatrove(folder / "00000_00000_shuffled.ds", documents)


WRITERS = (write_plain, write_headed, write_megatron, write_lit, write_ds)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 999), max_size=30), max_size=12),
    stretch=st.integers(1, 40),
)
def test_any_documents_are_read_back_and_reading_resumes_at_any_block(writer, documents, stretch):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "STRETCH", stretch)
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
@pytest.mark.parametrize("writer", [write_headed, write_megatron, write_ds])
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
    write(tmp_path / "a.bin", IDS[:10])
    write_pair(tmp_path / "b.bin", [IDS[10:20]], "<i4")
    write_lit_data(tmp_path / "c", [[IDS[20:30]]])
    write(tmp_path / "d.bin", IDS[30:40], header=False)
    assert tokens(corpus(tmp_path)) == IDS[:40].tolist()


# datatrove


@pytest.mark.parametrize("size", [2, 4])
def test_datatrove_s_metadata_tells_the_type_and_its_index_the_documents(tmp_path, size):
    documents = [IDS[:10].tolist(), [], IDS[10:3000].tolist()]
    wrong = {2: "uint32", 4: "uint16"}[size]
    source = corpus(write_datatrove(tmp_path / "a.ds", documents, size), dtype=wrong)
    assert tokens(source) == IDS[:3000].tolist()
    assert sum(block.documents for block in blocks(source)) == 3
    bare = {"metadata": None, "index": None}
    source = corpus(
        write_datatrove(tmp_path / "b.ds", documents, size, **bare), dtype=f"uint{size * 8}"
    )
    assert tokens(source) == IDS[:3000].tolist()
    assert not any(block.documents for block in blocks(source))


def test_metadata_of_early_datatrove_leaves_the_type_to_the_setting(tmp_path):
    write_datatrove(tmp_path / "a.ds", [IDS[:10].tolist()], 4, metadata=b"gpt2\n10\n10 T")
    assert tokens(corpus(tmp_path, dtype="uint32")) == IDS[:10].tolist()
    with pytest.raises(UserError, match=r"has 40 bytes, which is not 10 tokens of 2 bytes"):
        tokens(corpus(tmp_path))


def test_a_folder_of_datatrove_is_read_in_the_order_of_names(tmp_path):
    write_datatrove(tmp_path / "00001_shuffled.ds", [IDS[10:30].tolist()], 4)
    write_datatrove(tmp_path / "00000_shuffled.ds", [IDS[:10].tolist()])
    for place in (tmp_path, f"{tmp_path}/*.ds"):
        assert tokens(corpus(place)) == IDS[:30].tolist()


@pytest.mark.parametrize(
    ("beside", "line"),
    [
        ({"index": np.array([5, 9], "<u8").tobytes()}, "does not end with the 10 tokens"),
        ({"index": np.array([11, 10], "<u8").tobytes()}, "does not end with the 10 tokens"),
        ({"index": np.array([10], "<u8").tobytes()[:7]}, "does not end with the 10 tokens"),
        ({"index": b""}, "does not end with the 10 tokens"),
        ({"metadata": b"gpt2|2\n11\n"}, "has 20 bytes, which is not 11 tokens of 2 bytes"),
        ({"metadata": b"{}"}, "is not datatrove's, with the number of tokens"),
        ({"loss": b"\1" * 10}, "which tokens have a loss, which is not used; remove it"),
    ],
)
def test_files_of_datatrove_that_do_not_fit_are_one_clear_line(tmp_path, beside, line):
    write_datatrove(tmp_path / "a.ds", [IDS[:10].tolist()], **beside)
    with pytest.raises(UserError, match=line) as caught:
        tokens(corpus(tmp_path / "a.ds"))
    assert "\n" not in str(caught.value)


def test_an_index_of_datatrove_without_its_tokens_is_one_clear_line(tmp_path):
    write_datatrove(tmp_path / "a.ds", [IDS[:10].tolist()]).unlink()
    with pytest.raises(UserError, match=r"a\.ds\.\w+ has no a\.ds with its tokens"):
        tokens(corpus(tmp_path))


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
    monkeypatch.setattr(token_files, "STRETCH", 1000)
    source = corpus(write(tmp_path / "t.bin", IDS[:4500]), val_fraction=0.1)
    stretches = np.split(IDS[:4500], [1000, 2000, 3000, 4000])
    ends = [len(stretch) - len(stretch) // 10 for stretch in stretches]
    expected = np.concatenate([stretch[end:] for stretch, end in zip(stretches, ends, strict=True)])
    np.testing.assert_array_equal(split(source, "val"), expected)
    assert split(source, "train").size == 4050


@pytest.mark.parametrize("val", [None, "v.bin"])
def test_reading_resumes_at_any_block_of_several_files(tmp_path, monkeypatch, val):
    monkeypatch.setattr(token_files, "STRETCH", 1000)
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
def test_the_identity_of_plain_files_is_that_of_0_1_0(tmp_path, place):
    path = write(tmp_path / "t.bin", IDS)
    stat = path.stat()
    source = corpus(tmp_path / place, val_path=str(path))
    expected = [("t.bin", stat.st_size, stat.st_mtime)]
    assert source.identity() == [expected, expected]
    assert source.size == 2 * stat.st_size


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


@pytest.mark.parametrize(
    ("writer", "remedy"),
    [
        (write_plain, "raise it, or change data.dtype"),
        (write_headed, "raise it, or change data.dtype"),
        (write_megatron, "raise it"),
        (write_lit, "raise it"),
    ],
)
def test_a_token_above_the_vocabulary_is_rejected_by_name(tmp_path, writer, remedy):
    path = writer(tmp_path, [[1, 2], [300]])
    line = rf"\.bin of the corpus has the token 300, but data\.vocab_size=300; {remedy}$"
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
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_file_that_is_not_of_tokens_is_refused_by_name(tmp_path, name, remedy, alone):
    (tmp_path / name).write_bytes(b"even")
    if not alone:
        write(tmp_path / "t.bin", IDS)
    with pytest.raises(UserError, match=rf"{name} is not a token file; {remedy}"):
        blocks(corpus(tmp_path))


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^data\.path=.* matches no file; give a file"):
        blocks(corpus(tmp_path))


# Megatron-LM


@pytest.mark.parametrize("dtype", [dtype for dtype in MEGATRON if "f" not in dtype])
@pytest.mark.parametrize("place", ["", "p.bin", "*.bin", "p*"])
def test_a_pair_has_the_type_of_its_index(tmp_path, dtype, place):
    write_pair(tmp_path / "p.bin", [[1, 2, 3], [], [4, 100]], dtype)
    source = corpus(tmp_path / place)
    assert tokens(source) == [1, 2, 3, 4, 100]
    assert source.size == 5 * np.dtype(dtype).itemsize


@given(lengths=st.lists(st.integers(0, 9), max_size=20), stretch=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_each_document_counts_where_it_ends(lengths, stretch):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "STRETCH", stretch)
        path = write_pair(Path(folder) / "p.bin", [[7] * length for length in lengths])
        all_blocks = blocks(corpus(path))
    places = np.cumsum([0, *(len(block.ids) for block in all_blocks)]).tolist()
    ends = np.cumsum(lengths).tolist()
    expected = [sum(first < end <= last for end in ends) for first, last in pairwise(places)]
    assert [block.documents for block in all_blocks] == expected


def test_a_document_may_have_several_sequences(tmp_path):
    path = write_pair(tmp_path / "p.bin", [[1, 2], [3], [4]], ends=[2, 3])
    assert [block.documents for block in blocks(corpus(path))] == [2]


def test_the_identity_of_a_pair_is_that_of_both_files(tmp_path):
    path = write_pair(tmp_path / "p.bin", [[1, 2], [3]])
    by_file, by_folder = corpus(path).identity(), corpus(tmp_path).identity()
    assert by_file == by_folder
    path.with_suffix(".idx").write_bytes(index_of([1, 2], "<u2"))
    index = path.with_suffix(".idx").stat()
    assert [name for name, *_ in by_file[0]] == ["p.bin", "p.idx"]
    assert corpus(path).identity()[0][1][1:] == (index.st_size, index.st_mtime)


def test_an_index_of_other_tokens_does_not_matter(tmp_path):
    path = write(tmp_path / "t.bin", IDS)
    (tmp_path / "other.idx").write_bytes(b"")
    assert corpus(tmp_path / "*.bin").identity() == corpus(path).identity()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "does not begin as an index of Megatron-LM does; make it"),
        ({"version": 2}, "has version 2, but only version 1 is known; make it again"),
        ({"dtype": "<f4"}, "says that the tokens are float32, but ids are integers; make it"),
        ({"dtype": "<f8"}, "says that the tokens are float64, but ids are integers; make it"),
        ({"modes": b"\0\1"}, "has modes, as data with images does; choose a corpus of text"),
        ({"modes": b"\0"}, "has 83 bytes, but whole ones are 82; copy it again"),
        ({"ends": [1]}, "has documents that are not its sequences; make it again"),
        ({"ends": [2, 1, 2]}, "has documents that are not its sequences; make it again"),
        ({"lengths": (2, 2)}, r"p\.bin .* has 6 bytes, but 8 in .*p\.idx; copy both files"),
        ({"lengths": (4, -1)}, "has sequences that are not one after another; make it again"),
    ],
)
def test_a_wrong_index_is_one_clear_line(tmp_path, changes, line):
    path = write_pair(tmp_path / "p.bin", [[1, 2], [3]])
    content = index_of(**{"lengths": (2, 1), "dtype": "<u2", **changes})
    path.with_suffix(".idx").write_bytes(content)
    with pytest.raises(UserError, match=line) as caught:
        blocks(corpus(path))
    assert "\n" not in str(caught.value)


@given(end=st.integers(0, 81))
@settings(max_examples=82, deadline=None)
def test_an_index_truncated_anywhere_is_one_clear_line(end):
    with TemporaryDirectory() as folder:
        path = write_pair(Path(folder) / "p.bin", [[1, 2], [3]])
        index = path.with_suffix(".idx")
        index.write_bytes(index.read_bytes()[:end])
        with pytest.raises(UserError, match=r"p\.idx (has|does not) [^\n]*; "):
            blocks(corpus(path))


def test_sequences_with_gaps_are_refused(tmp_path):
    path = write_pair(tmp_path / "p.bin", [[1, 2], [3]])
    content = bytearray(path.with_suffix(".idx").read_bytes())
    content[50] += 2  # where the second sequence begins
    path.with_suffix(".idx").write_bytes(content)
    with pytest.raises(UserError, match="has sequences that are not one after another"):
        blocks(corpus(path))


@pytest.mark.parametrize("place", ["", "p.idx"])
def test_an_index_without_its_tokens_is_one_clear_line(tmp_path, place):
    write_pair(tmp_path / "p.bin", [[1]]).unlink()
    with pytest.raises(UserError, match=r"p\.idx has no p\.bin with its tokens; put it there"):
        blocks(corpus(tmp_path / place))


def test_a_negative_token_is_refused(tmp_path):
    path = write_pair(tmp_path / "p.bin", [[1, -1]], "<i4")
    with pytest.raises(UserError, match=r"p\.bin of the corpus has the token -1, but ids are at l"):
        blocks(corpus(path))


# litData


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("tensor", dtype) for dtype in TENSORS if "f" not in dtype]
    + [("numpy", dtype) for dtype in ARRAYS],
)
@pytest.mark.parametrize("place", ["", "chunk-*.bin", "*"])
def test_a_folder_of_lit_data_has_the_type_of_its_index(tmp_path, kind, dtype, place):
    write_lit_data(tmp_path, [[[1, 2], [3]], [[4, 100]]], dtype, kind)
    source = corpus(tmp_path / place)
    assert tokens(source) == [1, 2, 3, 4, 100]
    assert [name for name, *_ in source.identity()[0]] == [
        "chunk-0-0.bin",
        "chunk-0-1.bin",
        "index.json",
    ]


def test_chunks_come_in_the_order_of_the_index(tmp_path):
    write_lit_data(tmp_path, [[[number]] for number in range(12)])
    assert tokens(corpus(tmp_path)) == [*range(12)]


def test_sizes_and_loader_of_early_lit_data_may_differ(tmp_path):
    write_lit_data(tmp_path, [[[1, 2]]])
    index = json.loads((tmp_path / "index.json").read_text())
    index["chunks"][0]["chunk_bytes"] = 8
    del index["config"]["item_loader"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert tokens(corpus(tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"compression": "zstd"}, "has chunks with compression, which is not read; write it"),
        ({"encryption": {"algorithm": "fernet"}}, "has chunks with encryption, which is not"),
        ({"item_loader": "PyTreeLoader"}, "has items for PyTreeLoader, not tokens; write it"),
        ({"data_format": ["str"]}, "has items of str, not tokens; write it again"),
        ({"data_format": ["int", "str"]}, r"has items of \['int', 'str'\], not tokens alone"),
        ({"data_format": None}, "has items of None, not tokens alone; write it again"),
        ({"data_format": ["no_header_tensor:1"]}, "tensor:1, which are not integers; write it"),
        ({"data_format": ["no_header_tensor:x"]}, "tensor:x, not tokens; write it"),
    ],
)
def test_lit_data_without_plain_tokens_is_refused(tmp_path, config, line):
    write_lit_data(tmp_path, [[[1, 2]]], **config)
    with pytest.raises(UserError, match=rf"index\.json [^\n]*{line}"):
        blocks(corpus(tmp_path))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b'{"chunks": [', "is not JSON; copy the folder again"),
        (b"\xff\xfe", "is not JSON; copy the folder again"),
        (b"[]", "is not an index of litData, with `config` and `chunks`; name the token files"),
        (b'{"splits": {}}', "is not an index of litData"),
        (b'{"chunks": {}, "config": {}}', "is not an index of litData"),
    ],
)
def test_a_damaged_index_of_lit_data_is_one_clear_line(tmp_path, content, line):
    write_lit_data(tmp_path, [[[1, 2]]])
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"index\.json {line}"):
        blocks(corpus(tmp_path))


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("text", "has a chunk without `filename` or `chunk_size`; copy the folder"),
        ({"chunk_size": None}, "has a chunk without `filename` or `chunk_size`; copy"),
        ({"dim": None}, r"has no number of tokens \(`dim`\) for chunk-0-0\.bin; write it"),
        ({"filename": "other.bin"}, r"names other\.bin, which is missing; set data\.path"),
        ({"filename": "../t.bin"}, r"names \.\./t\.bin, which is missing; set data\.path"),
        ({"dim": 3}, r"chunk-0-0\.bin of the corpus has 20 bytes, but 24 in its index\.json"),
        ({"dim": 1, "chunk_size": 2}, "has 1 items, but 2 in its index.json; copy the folder"),
    ],
)
def test_a_chunk_that_its_index_does_not_describe_is_one_clear_line(tmp_path, entry, line):
    folder = write_lit_data(tmp_path / "lit", [[[1, 2]]])
    write(tmp_path / "t.bin", IDS)
    index = json.loads((folder / "index.json").read_text())
    first = index["chunks"][0]
    index["chunks"] = [{**first, **entry} if isinstance(entry, dict) else entry]
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=line) as caught:
        blocks(corpus(folder))
    assert "\n" not in str(caught.value)


def test_a_truncated_chunk_is_one_clear_line(tmp_path):
    write_lit_data(tmp_path, [[[1, 2]], [[3]]])
    (tmp_path / "chunk-0-1.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"chunk-0-1\.bin of the corpus has 0 bytes, but 16 in its"):
        blocks(corpus(tmp_path))


def test_a_file_beside_chunks_that_the_index_lacks_is_refused(tmp_path):
    write(write_lit_data(tmp_path, [[[1, 2]]]) / "more.bin", IDS)
    with pytest.raises(UserError, match=r"more\.bin is not in .*index\.json; remove it, or copy"):
        blocks(corpus(tmp_path))


def test_one_chunk_of_several_is_refused(tmp_path):
    write_lit_data(tmp_path, [[[1, 2]], [[3]]])
    with pytest.raises(
        UserError, match=r"names chunk-0-1\.bin, which is missing; set data\.path to"
    ):
        blocks(corpus(tmp_path / "chunk-0-0.bin"))


# Prepared folders


@pytest.mark.parametrize("writer", WRITERS)
def test_prepared_tokens_are_those_of_the_files(tmp_path, writer):
    train = writer(tmp_path / "t", [IDS[:2000].tolist(), IDS[2000:].tolist()])
    val = write(tmp_path / "v.bin", IDS[:99])
    folder = prepare(corpus(train, val_path=str(val), root=str(tmp_path / "data")))
    np.testing.assert_array_equal(open_split(folder, "train"), IDS)
    np.testing.assert_array_equal(open_split(folder, "val"), IDS[:99])
    index = load_index(folder)
    assert index.tokenizer["vocab_size"] == 50_257
    with_documents = (write_megatron, write_ds)
    assert index.splits["train"].documents == (2 if writer in with_documents else 0)


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
    line = rf"data\.vocab_size=50257 is not that of .*; set data\.vocab_size={tokenizer.vocab_size}"
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


def test_an_index_of_lit_data_that_is_nested_too_deeply_is_named(tmp_path):
    write_lit(tmp_path, [range(20)])
    (tmp_path / "index.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"index\.json is not JSON; copy the folder again"):
        tokens(corpus(tmp_path))


def test_another_vocabulary_for_prepared_numbers_is_refused(tmp_path):
    path = write(tmp_path / "t.bin", IDS % 600)
    settings = {"vocab_size": 600, "root": str(tmp_path / "data")}
    folder = prepare(corpus(path, **settings))
    assert prepare(corpus(path, **settings)) == folder
    other = corpus(path, **settings | {"vocab_size": 700})
    rule = rf"^data\.vocab_size=700: {folder} was prepared with 600; set data\.vocab_size=600, or "
    with pytest.raises(UserError, match=rule):
        prepare(other)
    other.fingerprint = load_index(folder).fingerprint  # as in a run from before this check
    assert prepare(other) == folder
