"""A token file of another type, or of another format, is refused by what it seems to be."""

import bz2
import gzip
import io
import json
import logging
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile

import numpy as np
import pytest
import zstandard

from lockstep.errors import UserError
from lockstep.tokens.recipe import recipe_of
from lockstep.tokens.sources import number_types
from lockstep.tokens.sources.pretokenized import TokenFiles
from lockstep.tokens.sources.source import Position

DRAW = np.random.default_rng(0)
SIZE = 20_000
LETTERS = DRAW.choice([*b"some words, and others; A to Z: JQXVKZ. "], SIZE)
# Ids as they are in real files: those of common tokens are small.
IDS = {
    "uniform": DRAW.integers(50_257, size=SIZE),
    "few": DRAW.integers(300, size=SIZE),
    "letters": LETTERS - 32,
    "common": np.minimum((DRAW.pareto(0.7, SIZE) * 100).astype(int), 50_256),
    "padded": np.where(np.arange(SIZE) // 512 % 2, 0, DRAW.integers(50_257, size=SIZE)),
    "short": DRAW.integers(300, size=100),
    "repeated": np.tile(DRAW.integers(50_257, size=10), 2000),
    "alternating": np.tile([300, 5], SIZE // 2),
    "with zeros between": np.tile([7, 0], SIZE // 2),
    "one": np.full(SIZE, 8224),
    "zeros": np.zeros(SIZE, int),
    "mostly padding": np.where(DRAW.random(SIZE) < 0.01, DRAW.integers(50_257, size=SIZE), 0),
}
WIDE = np.minimum((DRAW.pareto(0.6, SIZE) * 100).astype(int), 128_255)


def written(path, ids, code):
    ids.astype(np.int64).astype(code).tofile(path)
    return path


def tokens(path, **settings):
    blocks = TokenFiles(path=str(path), **settings).blocks(Position())
    return [token for block in blocks for token in block.ids.tolist()]


def fault_of(path, **settings):
    with pytest.raises(UserError) as caught:
        tokens(path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}")
    return line


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize(("dtype", "code"), [(None, "<u2"), ("uint16", "<u2"), ("uint32", "<u4")])
def test_real_ids_of_the_right_type_are_read_without_a_word(tmp_path, caplog, ids, dtype, code):
    path = written(tmp_path / "t.bin", ids, code)
    assert sorted(tokens(path, dtype=dtype)) == sorted(ids.tolist())
    assert not caplog.records


def test_ids_above_16_bits_are_read_without_a_word(tmp_path, caplog):
    path = written(tmp_path / "t.bin", WIDE, "<u4")
    assert sorted(tokens(path, dtype="uint32", vocab_size=128_256)) == sorted(WIDE.tolist())
    assert not caplog.records


OTHERS = {
    "uint32": "<u4",
    "int64": "<i8",
    "big-endian uint16": ">u2",
    "big-endian uint32": ">u4",
    "big-endian int64": ">i8",
    "float32": "<f4",
    "float64": "<f8",
}
CASES = [(name, kind) for name in OTHERS for kind in ("few", "common", "padded", "letters")]
CASES.remove(("big-endian uint16", "padded"))  # uniform: only the vocabulary tells


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_file_of_another_type_is_refused_with_the_one_that_it_seems_to_have(tmp_path, name, kind):
    path = written(tmp_path / "t.bin", IDS[kind], OTHERS[name])
    line = fault_of(path)
    assert f", as in a file of {name}; " in line
    assert line.endswith("; or, if it is of uint16, set data.source.dtype=uint16")
    assert ("; set data.source.dtype=uint32; or" in line) == (name == "uint32")


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "big-endian uint16"])
def test_ids_above_16_bits_have_their_type_too(tmp_path, name):
    path = written(tmp_path / "t.bin", WIDE, OTHERS[name])
    assert f", as in a file of {name}; " in fault_of(path, vocab_size=128_256)


def test_the_fact_is_what_is_read(tmp_path):
    path = written(tmp_path / "t.bin", IDS["few"], "<u4")
    assert fault_of(path) == (
        f"{path} of the corpus: every second number is 0, as in a file of uint32; set "
        "data.source.dtype=uint32; or, if it is of uint16, set data.source.dtype=uint16"
    )
    written(path, IDS["few"], "<i8")
    assert ": three of four numbers are 0, as in a file of int64; convert it: " in fault_of(path)
    written(path, WIDE, "<u4")
    assert ": every second number is at most 1, as in a file of uint32; set " in fault_of(path)
    written(path, IDS["letters"], "u1")
    assert ": both bytes of its numbers have the same values, as in a file of uint8" in fault_of(
        path
    )


@pytest.mark.parametrize("folder", ["plain", "it's $HOME"])
@pytest.mark.parametrize("vocab_size", [50_257, 128_256])
@pytest.mark.parametrize("code", ["<i8", ">u2", ">i4", "<f4", "u1"])
def test_the_command_of_the_remedy_converts_the_file(tmp_path, code, vocab_size, folder):
    (tmp_path / folder).mkdir()
    ids = IDS["letters"]
    path = written(tmp_path / folder / "t.bin", ids, code)
    line = fault_of(path, vocab_size=vocab_size)
    command, new, dtype = re.search(
        r"convert it: (python -c .*), and give (.*) with data\.source\.dtype=(\w+); or", line
    ).groups()
    _, *words = shlex.split(command)
    assert "$" not in command or "'" in command
    subprocess.run([sys.executable, *words], check=True)
    assert sorted(tokens(new, dtype=dtype, vocab_size=vocab_size)) == sorted(ids.tolist())


@pytest.mark.parametrize(("code", "name"), [("<i4", "int32"), ("<i8", "int64"), ("<f4", "float32")])
def test_a_mask_of_minus_one_is_left_out(tmp_path, code, name):
    ids = np.where(DRAW.random(SIZE) < 0.1, -1, IDS["common"])
    path = written(tmp_path / "t.bin", ids, code)
    line = fault_of(path)
    assert f"as in a file of {name}; convert it, without its -1: python -c " in line
    command = re.search(r"(python -c .*), and give", line)[1]
    subprocess.run([sys.executable, *shlex.split(command)[1:]], check=True)
    converted = np.fromfile(tmp_path / "t.uint16.bin", "<u2")
    assert converted.tolist() == ids[ids >= 0].tolist()


@pytest.mark.parametrize(
    ("dtype", "code", "token"), [("uint16", "<i2", 65_535), ("uint32", "<i4", 2**32 - 1)]
)
def test_a_mask_is_named_if_the_type_is_right(tmp_path, dtype, code, token):
    path = written(tmp_path / "t.bin", np.where(DRAW.random(SIZE) < 0.1, -1, IDS["few"]), code)
    line = fault_of(path, dtype=dtype)
    assert (
        f"has the token {token} (which is -1 in {dtype[1:]}), but data.source.vocab_size=" in line
    )
    assert "; leave it out of the file, or " in line


def test_numbers_that_are_no_ids_are_not_converted(tmp_path):
    path = tmp_path / "t.bin"
    for code, name in (("<f4", "float32"), ("<f8", "float64")):
        DRAW.standard_normal(SIZE).astype(code).tofile(path)
        line = fault_of(path)
        assert f"as in a file of {name}; give files that are flat arrays of tokens" in line


@pytest.mark.parametrize(
    ("dtype", "code"), [("uint16", "<u4"), ("uint16", "<f4"), ("uint32", "<i8")]
)
def test_a_type_that_is_set_wins_over_a_guess_which_is_a_warning(tmp_path, caplog, dtype, code):
    ids = IDS["few"]
    path = written(tmp_path / "t.bin", ids, code)
    caplog.set_level(logging.WARNING)
    read = np.fromfile(path, f"<u{int(dtype[4:]) // 8}")
    assert sorted(tokens(path, dtype=dtype)) == sorted(read.tolist())
    (line,) = caplog.messages
    assert line.startswith(f"{path} of the corpus: ")
    assert line.endswith(f"; it is read as data.source.dtype={dtype}")


@pytest.mark.parametrize(
    ("code", "settings", "remedy"),
    [
        ("<u2", {"dtype": "uint32"}, "as in a file of uint16: set data.source.dtype=uint16"),
        (">u2", {}, "as in a file of big-endian uint16: convert it: python -c "),
        ("<u2", {"vocab_size": 9000}, "raise it, or change data.source.dtype"),
    ],
)
def test_ids_above_the_vocabulary_are_answered_with_the_type_that_fits(
    tmp_path, code, settings, remedy
):
    path = written(tmp_path / "t.bin", IDS["uniform"], code)
    line = fault_of(path, **settings)
    assert re.search(r" has the token \d+, but data\.source\.vocab_size=\d+; ", line)
    assert remedy in line


def test_padding_at_the_start_of_a_long_file_hides_nothing(tmp_path):
    ids = np.concatenate([np.zeros(400_000, int), np.tile(IDS["common"], 10)])
    assert len(tokens(written(tmp_path / "t.bin", ids, "<u2"))) == len(ids)
    path = written(tmp_path / "u.bin", ids, "<u4")
    assert "as in a file of uint32" in fault_of(path)
    ids = np.concatenate([np.tile(IDS["common"], 10), np.tile([7, 0], 10_000)])
    assert len(tokens(written(tmp_path / "t.bin", ids, "<u2"))) == len(ids)


def test_a_sample_is_of_several_places_on_this_machine_only():
    content = np.arange(1 << 20, dtype="<u2").tobytes()
    asked = []

    def read(start, size):
        asked.append(start)
        return content[start : start + size]

    limit = number_types.PLACES * number_types.PIECE
    assert len(number_types.sample_of(read, len(content), is_here=True)) == limit
    assert len({*asked}) == number_types.PLACES
    assert not any(start % 8 for start in asked)
    assert asked[-1] > len(content) * 0.99
    asked.clear()
    assert number_types.sample_of(read, len(content), is_here=False) == content[:limit]
    assert asked == [0]


def test_the_default_type_leaves_fingerprints_and_marks_as_they_were(tmp_path):
    path = written(tmp_path / "t.bin", IDS["few"], "<u2")
    default = TokenFiles(path=str(path))
    explicit = TokenFiles(path=str(path), dtype="uint16")
    assert recipe_of(default).settings["dtype"] == "uint16"
    assert recipe_of(default).fingerprint == recipe_of(explicit).fingerprint
    assert default.marks() == explicit.marks()
    assert recipe_of(default).fingerprints["settings"] == (
        "7333adffa3e9236da2237dcc86fd8f565616856ee4713d5f1dfa6859a0b6ef43"
    )


# Other formats


def npy():
    file = io.BytesIO()
    np.save(file, IDS["few"].astype("<u2"))
    return file.getvalue()


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a", b"content" * 99)
    return file.getvalue()


def tarred():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    return file.getvalue()


def safetensors(size):
    header = json.dumps({f"w{n}": {"dtype": "U8", "shape": [1]} for n in range(size)}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(100)


def of_llm_c(magic):
    words = np.zeros(256, "<i4")
    words[0] = magic
    return words.tobytes() + bytes(1000)


FORMATS = {
    "an array of NumPy with a header (.npy), not a flat array of tokens; save its array": npy(),
    "packed with gzip, not a flat array of tokens; unpack it": gzip.compress(
        b"content" * 99, mtime=0
    ),
    "packed with zstd, not a flat array of tokens; unpack": zstandard.compress(b"content" * 99),
    "packed with bzip2, not a flat array of tokens; unpack it": bz2.compress(b"content" * 99),
    "a tar archive, not a flat array of tokens; unpack it": tarred(),
    "a ZIP archive, such as an .npz file or a model of PyTorch": zipped(),
    "a Parquet file, not a flat array of tokens; use data=parquet": b"PAR1" + bytes(100) + b"PAR1",
    "a safetensors file, not a flat array of tokens; give files": safetensors(3),
    "a safetensors file, not": safetensors(300),
    "a model of llm.c, not a flat array of tokens": of_llm_c(20240326),
    "a tokenizer of llm.c, not a flat array": of_llm_c(20240328),
    "an index of Megatron-LM, not": b"MMIDIDX\0\0" + bytes(100),
}


@pytest.mark.parametrize("dtype", [None, "uint16"])
@pytest.mark.parametrize(("line", "content"), FORMATS.items())
def test_a_file_of_another_format_is_named_for_what_it_is(tmp_path, line, content, dtype):
    path = tmp_path / "t.bin"
    path.write_bytes(content)
    assert f"{path} is {line}" in fault_of(path, dtype=dtype)


@pytest.mark.parametrize("ending", ["", "x"])
@pytest.mark.parametrize(
    "text", ["some words, and more\n", "деревья и кусты\n", "日本語のテキスト。\n"]
)
def test_a_text_is_no_token_file(tmp_path, text, ending):
    path = tmp_path / "t.bin"
    path.write_text(text * 2000 + ending, "utf-8")
    line = fault_of(path)
    assert (
        ": its bytes are characters, as in a file of text, or of uint8; use data=text, or" in line
    )


def test_a_type_on_a_server_is_refused_without_a_command(serving, tmp_path):
    written(tmp_path / "t.bin", IDS["few"], "<i8")
    with serving(tmp_path) as (url, _):
        line = fault_of(f"{url}/t.bin")
    assert "as in a file of int64; convert it to uint16 or uint32; or, if it is of uint16" in line


def test_a_setting_of_a_mixture_has_its_place(tmp_path):
    from lockstep.mixtures.mixture import Mixture
    from lockstep.tokens.prepare import prepare

    path = written(tmp_path / "t.bin", IDS["few"], "<u4")
    sources = {"code": TokenFiles(path=str(path), vocab_size=300)}
    mixture = Mixture(root=str(tmp_path / "data"), sources=sources, weights={"code": 1.0})
    with pytest.raises(UserError, match=r"; set data\.source\.sources\.code\.dtype=uint32; or, "):
        prepare(mixture)


def test_the_command_refuses_another_type_in_one_line(command, tmp_path):
    written(tmp_path / "t.bin", IDS["few"], "<u4")
    words = ["prepare", "data=shards", "data.source.vocab_size=300", "data.source.path=t.bin"]
    line = command(*words, f"data.root={tmp_path / 'data'}", status=2).stderr
    assert "t.bin of the corpus: every second number is 0, as in a file of uint32; set data" in line
    assert line.count("\n") == 1
    command(*words, f"data.root={tmp_path / 'data'}", "data.source.dtype=uint32")
