"""Our tokenizers as the files that transformers' `AutoTokenizer` reads: the same ids, both ways."""

from __future__ import annotations

import json
from typing import Any

from lockstep_gpt.config import UserError
from lockstep_gpt.data.tokenizer import END_OF_TEXT, Tokenizer, library

Files = dict[str, dict[str, Any]]  # name -> what is in it, as JSON


def as_files(tokenizer: Tokenizer, block_size: int) -> Files:
    """Return the files of `tokenizer`.

    Raises:
        UserError: it is of a kind that transformers has nothing like.
    """
    values = tokenizer.to_dict()
    if values["kind"] not in MAKERS:
        raise UserError(
            f"tokenizer kind {values['kind']!r} is not one of {', '.join(MAKERS)}, which can be "
            "exported; describe it in export/tokenizer_files.py"
        )
    content = MAKERS[values["kind"]](values)
    end = end_of_text(content, tokenizer.end_of_text)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "model_input_names": ["input_ids", "attention_mask"],  # older ones add types of tokens
        "clean_up_tokenization_spaces": False,
        # A text's own "<|endoftext|>" is text, as it was in training.
        "split_special_tokens": True,
        **({"bos_token": end, "eos_token": end} if end else {}),
    }
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def end_of_text(content: dict[str, Any], token: int | None) -> str | None:
    """Return how tokenizer.json writes the id that ends a document."""
    added = {each["id"]: each["content"] for each in content["added_tokens"]}
    words = {place: word for word, place in content["model"]["vocab"].items()} | added
    return None if token is None else words[token]


def _bytes(_: dict[str, Any]) -> dict[str, Any]:
    """Return the 256 bytes as a byte-level BPE without merges, in which id 0 ends a document."""
    lib = library("tokenizers", "export")
    words = {sign: byte for byte, sign in _signs().items()} | {END_OF_TEXT: 0}
    del words[_signs()[0]]
    tokenizer = lib.Tokenizer(lib.models.BPE(vocab=words, merges=[]))
    # Ours refuses a NUL in a text, which would look like an end; this format can only replace it.
    tokenizer.normalizer = lib.normalizers.Replace("\0", " ")
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return dict(json.loads(tokenizer.to_str()))


def _signs() -> dict[int, str]:
    """Return byte -> the printable sign that byte-level vocabularies have for it (GPT-2's code)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shown = {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {byte: shown.get(byte, chr(byte)) for byte in range(256)}


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return decimal numbers between spaces."""
    lib = library("tokenizers", "export")
    words = {str(number): number for number in range(values["vocab_size"])}
    tokenizer = lib.Tokenizer(lib.models.WordLevel(words))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.WhitespaceSplit()
    return dict(json.loads(tokenizer.to_str()))


def _pairs(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer itself, which adds nothing to a text and cuts none."""
    own = dict(json.loads(values["json"]))
    return {**own, "post_processor": None, "truncation": None, "padding": None}


MAKERS = {"bytes": _bytes, "numbers": _numbers, "bpe": _pairs}
