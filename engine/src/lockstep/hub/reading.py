"""Weights that transformers wrote, for a model that begins with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.hub.layout import Layout, Model
from lockstep.optional import import_optional
from lockstep.settings import as_typed
from lockstep.tokens.tokenizer import Tokenizer
from lockstep.tokens.tokenizer_choice import WORDS
from lockstep.tokens.tokenizer_files import ON_HUB, SIZES

WEIGHTS = "model.safetensors"
FILES = '"*.json" "*.safetensors"'  # of a repository on the hub
INDEX = "model.safetensors.index.json"
SAME = {"gelu_pytorch_tanh": "gelu_new"}  # two names for one function


def weights_of_folder(
    folder: Path, model: Model, tokenizer: Tokenizer | None, layout: Layout, source: str
) -> tuple[dict[str, Tensor], int]:
    """Return the weights of a folder with the names and shapes of `model`, and their context.

    A context that is shorter than the saved one uses its first positions. It may be longer only
    if positions aren't learned.

    Raises:
        UserError: the architecture, shape, or vocabulary differs; the message starts with `source`.
    """
    saved = _settings(folder, source)
    _check_settings(saved, model, layout, source)
    _check_tokenizer(folder, saved, tokenizer, source)
    weights = layout.imported(dict(_weights(folder, source)), model, source)
    (longest,) = (saved[name] for name, ours in layout.names.items() if ours == "block_size")
    return weights, longest


def _settings(folder: Path, source: str) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        if not folder.exists() and ON_HUB.fullmatch(str(folder)):
            repository = f"openai-community/{folder}" if str(folder) in SIZES else folder
            raise UserError(
                f"{source} does not exist; name a folder, or download a model of the hub: "
                f"hf download {repository} {FILES} --local-dir {folder}"
            ) from None
        raise UserError(
            f"{source} is neither a run nor a folder of transformers: its config.json cannot be "
            f"read ({reason}); name a run, or a folder that save_pretrained or export has written"
        ) from None


def _check_settings(saved: dict[str, Any], model: Model, layout: Layout, source: str) -> None:
    """Reject a model that the weights don't fit; each error names the remedy."""
    if saved.get("model_type") != layout.model_type:
        raise UserError(
            f"{source} is for {saved.get('model_type')}, but {type(model).__name__} needs "
            f"{layout.model_type}; give a {layout.model_type} folder"
        )
    learned = layout.positions in model.state_dict()
    for theirs, ours in layout.names.items():
        theirs_is = saved.get(theirs)
        ours_is = getattr(model, ours)
        if ours == "n_kv_head":
            theirs_is = theirs_is or saved["n_head"]
        if theirs_is is None and "ngram" in ours:  # an earlier export, without it
            theirs_is = 0 if ours == "ngram_rows" else ours_is
        longer = ours == "block_size" and isinstance(theirs_is, int) and theirs_is > ours_is
        if theirs_is != ours_is and not longer and (ours != "block_size" or learned):
            wanted = f"model.{ours}={as_typed(theirs_is)}"
            raise UserError(
                f"{source} has {theirs}={as_typed(theirs_is)}, but model.{ours}="
                f"{as_typed(ours_is)}; set {wanted}"
            )
    about = layout.about(model)
    for name in layout.computes:
        value = saved.get(name, about[name])
        if SAME.get(value, value) != about[name]:
            wanted = f"{name}={as_typed(about[name])}"
            raise UserError(
                f"{source} has {name}={as_typed(value)}, but the model computes with {wanted}; "
                f"choose weights trained with {wanted}"
            )


def _check_tokenizer(
    folder: Path, saved: dict[str, Any], tokenizer: Tokenizer | None, source: str
) -> None:
    """Reject weights that were trained with another tokenizer than the data's."""
    if tokenizer is None:
        return  # an owner's data
    remedy = f"set tokenizer={folder}, or bytes if it was trained on bytes"
    size = saved.get("vocab_size")
    ours = tokenizer.vocab_size
    if size != ours:
        raise UserError(
            f"{source} has a vocabulary of {size}, but the data's tokenizer has {ours}; {remedy}"
        )
    if tokenizer.end_of_text is None:
        return  # the tokens never were text
    ids = _ids_of_probe(folder, source)
    if ids is not None and ids != tokenizer.encode(WORDS).tolist():
        raise UserError(f"{source} tokenizes text differently than the data; {remedy}")


def _ids_of_probe(folder: Path, source: str) -> list[int] | None:
    """Return the probe's ids from the folder's own tokenizer, or None if there is none."""
    single = folder / "tokenizer.json"
    pair = [folder / "vocab.json", folder / "merges.txt"]
    if not single.is_file() and not all(file.is_file() for file in pair):
        return None
    import tokenizers as lib

    try:
        if single.is_file():
            tokenizer = lib.Tokenizer.from_file(str(single))
        else:
            tokenizer = lib.ByteLevelBPETokenizer.from_file(*map(str, pair))
        return list(tokenizer.encode(WORDS, add_special_tokens=False).ids)
    except Exception as error:  # the library doesn't have its own error class
        raise UserError(f"{source} has a damaged tokenizer ({error}); copy it again") from error


def _weights(folder: Path, source: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights from the single file, or from the files in the index."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = sorted(set(index["weight_map"].values()))
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"{source} lacks {name}; load it with transformers and save it again with "
                "save_pretrained, which writes safetensors"
            )
        content = _loaded(folder / name)
        yield from ((key, weight.to(torch.float32)) for key, weight in content.items())


def _loaded(path: Path) -> dict[str, Tensor]:
    lib = import_optional("a .safetensors file", "safetensors.torch", "hub")
    try:
        return dict(lib.load_file(path))
    except Exception as error:  # the library raises its own error class and others
        raise UserError(f"{path} cannot be read ({error}); copy it again") from error
