"""Our tokenizers as files for transformers' `AutoTokenizer`: the same ids for the same text."""

from __future__ import annotations

import json
from typing import Any

from lockstep.errors import UserError
from lockstep.tokens.tokenizer import END_OF_TEXT, Tokenizer, byte_characters

Files = dict[str, dict[str, Any]]  # name -> content, as JSON


def as_files(tokenizer: Tokenizer, block_size: int) -> Files:
    """Return the files of `tokenizer`.

    Raises:
        UserError: this kind of tokenizer can't be exported.
    """
    values = tokenizer.to_dict()
    if values["kind"] not in MAKERS:
        raise UserError(
            f"tokenizer kind {values['kind']!r} is not one of {', '.join(MAKERS)}, which can be "
            "exported; use one of these"
        )
    content = MAKERS[values["kind"]](values)
    end = end_of_text(content, tokenizer.end_of_text)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "model_input_names": ["input_ids", "attention_mask"],  # older versions add token types
        "clean_up_tokenization_spaces": False,
        # A literal "<|endoftext|>" in a text stays text, as in training.
        "split_special_tokens": True,
    }
    if end:
        config |= {"bos_token": end, "eos_token": end}
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def end_of_text(content: dict[str, Any], token: int | None) -> str | None:
    """Return the token in tokenizer.json whose id ends a document, or None."""
    added = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
    words = {place: word for word, place in content["model"]["vocab"].items()} | added
    return None if token is None else words[token]


def _bytes(_: dict[str, Any]) -> dict[str, Any]:
    """Return a byte-level BPE of the 256 bytes, without merges; id 0 ends a document."""
    import tokenizers as lib

    words = {sign: byte for byte, sign in byte_characters().items()} | {END_OF_TEXT: 0}
    del words[byte_characters()[0]]
    tokenizer = lib.Tokenizer(lib.models.BPE(vocab=words, merges=[]))
    # Ours rejects a NUL in a text, which would look like an end; this format can only replace it.
    tokenizer.normalizer = lib.normalizers.Replace("\0", " ")
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = lib.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return dict(json.loads(tokenizer.to_str()))


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer of decimal numbers that are separated by spaces."""
    import tokenizers as lib

    words = {str(number): number for number in range(values["vocab_size"])}
    tokenizer = lib.Tokenizer(lib.models.WordLevel(words))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.WhitespaceSplit()
    return dict(json.loads(tokenizer.to_str()))


def _pairs(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer itself, without post-processing, truncation, and padding."""
    content = dict(json.loads(values["json"]))
    return {**content, "post_processor": None, "truncation": None, "padding": None}


MAKERS = {"bytes": _bytes, "numbers": _numbers, "bpe": _pairs}
