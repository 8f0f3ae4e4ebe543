"""Which format each file of a corpus of tokens has, by the files beside it and its ending."""

from __future__ import annotations

from lockstep_gpt.data.sources import datatrove, litdata
from lockstep_gpt.data.sources.files import Files, find_files
from lockstep_gpt.data.sources.megatron import MegatronTokens
from lockstep_gpt.data.sources.token_formats import PlainTokens, TokenFormat
from lockstep_gpt.errors import UserError

TOKENS = ".bin"
INDEX = ".idx"
ALONE = "remove it, or name the token files alone, as in data.path=FOLDER/*.bin"
# Files that are surely not tokens; any other ending may be theirs.
OTHERS = {
    ".txt": "use data=text",
    ".json": "use data=jsonl",
    ".jsonl": "use data=jsonl",
    ".parquet": "use data=parquet",
    ".npy": "save its array with tofile(), which writes no header",
    ".md": ALONE,
    ".pkl": ALONE,
    ".py": ALONE,
}
PACKED = (".gz", ".zst")


def find_token_files(path: str, setting: str, split: str | None) -> Files:
    """Return the files that `path` names, and the indices beside them.

    A folder has its indices; a file or a glob may name only the tokens.

    Args:
        path: the folder, glob, file, or URL.
        setting: the setting that the path is from.
        split: the split of all the files; None: their tokens are divided.

    Raises:
        UserError: there are none, or the file system can't be read.
    """
    group = find_files(path, setting=setting, split=split)
    if path.endswith(TOKENS):
        places = [path.removesuffix(TOKENS) + INDEX]
    elif path.endswith(datatrove.TOKENS):
        places = [path + ending for ending in datatrove.BESIDE]
    else:
        return group
    names = {file.path for file in group.files}
    beside = [
        file
        for place in places
        for file in find_files(place, setting=setting, split=split, may_lack=True).files
    ]
    wanted = [file for file in beside if _tokens_of(file.path) in names]
    folder, separator, name = path.rpartition("/")
    if name.startswith(litdata.CHUNK):
        index = f"{folder}{separator}{litdata.INDEX}"
        wanted += find_files(index, setting=setting, split=split, may_lack=True).files
    new = [file for file in wanted if file.path not in names]
    group.files = sorted([*group.files, *new], key=lambda file: file.name)
    return group


def formats_of(group: Files, dtype: str) -> list[TokenFormat]:
    """Return the files with tokens, in the order in which they are read.

    Args:
        group: all files of a split, with indices.
        dtype: type of tokens in files that don't say it.

    Raises:
        UserError: a file isn't one of tokens, or a file is missing.
    """
    files = {file.path: file for file in group.files}
    chunks = {
        file.path.removesuffix(litdata.INDEX): litdata.read_index(file, files, group.open)
        for file in group.files
        if _name(file.path) == litdata.INDEX
    }
    listed = {chunk.file.path for of_folder in chunks.values() for chunk in of_folder}
    formats: list[TokenFormat] = []
    for path, file in files.items():
        folder = path.removesuffix(_name(path))
        if _name(path) == litdata.INDEX:
            formats += chunks[folder]
        elif path in listed:
            continue
        elif folder in chunks:
            raise UserError(
                f"{path} is not in {folder}{litdata.INDEX}; remove it, or copy the folder again"
            )
        elif _is_index(path):
            if _tokens_of(path) not in files:
                raise UserError(
                    f"{path} has no {_name(_tokens_of(path))} with its tokens; put it there, or "
                    "set data.path to it"
                )
        elif _index_of(path) in files:
            formats.append(MegatronTokens(file, group.open, files[_index_of(path)]))
        elif path.endswith(datatrove.TOKENS):
            formats.append(datatrove.DatatroveTokens(file, group.open, dtype, files))
        else:
            _refuse_other(path)
            formats.append(PlainTokens(file, group.open, dtype))
    return formats


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _is_index(path: str) -> bool:
    """Return whether a file belongs to one with tokens, beside it."""
    return path.endswith(INDEX) or datatrove.tokens_of(path) is not None


def _tokens_of(index: str) -> str:
    """Return the path of the tokens that an index belongs to."""
    return datatrove.tokens_of(index) or index.removesuffix(INDEX) + TOKENS


def _index_of(tokens: str) -> str:
    """Return the path that Megatron-LM's index of these tokens would have."""
    return tokens.removesuffix(TOKENS) + INDEX


def _refuse_other(path: str) -> None:
    """Raise a `UserError` if the name of a file is not that of token files."""
    name = _name(path).lower()
    remedy = "unpack it" if name.endswith(PACKED) else None
    for packed in PACKED:
        name = name.removesuffix(packed)
    for ending, better in OTHERS.items():
        if name.endswith(ending):
            remedy = better
    if remedy:
        raise UserError(f"{path} is not a token file; {remedy}")
