"""A tokenizer of your own: a class in your project's package, which `tokenizer` names by its path.

`OwnTokenizer` in `tokenizer.py` says what it needs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from lockstep import project
from lockstep.errors import UserError
from lockstep.tokens.tokenizer import OwnTokenizer, Tokenizer

METHODS = ("train", "encode", "encode_documents", "decode", "to_dict")
# No part begins with an underscore: to import `__main__` would be to run it.
DOTTED = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")


def is_class_path(name: str) -> bool:
    """Return whether a name is the path of a class, of the project or of another package."""
    return DOTTED.fullmatch(name) is not None and not name.endswith((".json", ".tiktoken"))


def is_class_of_package(name: str) -> bool:
    """Return whether a name is the path of a class of the project's package."""
    package = project.package()
    return package is not None and is_class_path(name) and name.startswith(f"{package}.")


def load_class(name: str) -> type[OwnTokenizer]:
    """Return the class of this path.

    Only classes of the project's package are imported: the name may be from a file of someone else.

    Raises:
        UserError: there is no such class, or it lacks a method.
    """
    package = project.package()
    if package is None:
        raise UserError(
            f"tokenizer {name} is a class, which only a project's package may have; "
            "begin a lockstep.project.Project there"
        )
    remedy = f"name a class as {package}.module.Class"
    if not is_class_of_package(name):
        raise UserError(f"tokenizer {name} is outside of {package}; {remedy}")
    module, _, attribute = name.rpartition(".")
    try:
        named = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"tokenizer {name} cannot be imported ({error}); {remedy}") from error
    if not isinstance(named, type) or not named.__module__.startswith(f"{package}."):
        raise UserError(f"tokenizer {name} is not a class of {package}; {remedy}")
    lacking = [method for method in METHODS if not callable(getattr(named, method, None))]
    if lacking:
        raise UserError(
            f"tokenizer {name} lacks {', '.join(lacking)}; define what "
            "lockstep.tokens.tokenizer.OwnTokenizer describes"
        )
    return cast("type[OwnTokenizer]", named)


def train_tokenizer(name: str, vocab_size: int | None, texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer of this class, trained on `texts`.

    Raises:
        UserError: its values don't fit what the rest of the project needs.
    """
    tokenizer = load_class(name).train(iter(texts), vocab_size)
    size = getattr(tokenizer, "vocab_size", None)
    if not isinstance(size, int) or size < 1:
        raise UserError(f"tokenizer {name} has vocab_size={size}; set it to its number of ids")
    end = getattr(tokenizer, "end_of_text", None)
    if not isinstance(end, int) or not 0 <= end < size:
        raise UserError(
            f"tokenizer {name} has end_of_text={end}; set it to the id that ends a document, "
            f"from 0 to {size - 1}"
        )
    values: Any = tokenizer.to_dict()
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind != name:
        raise UserError(f"tokenizer {name} has kind={kind} in to_dict; set it to {name!r}")
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"tokenizer {name} cannot be saved ({error}); let to_dict return plain JSON values"
        ) from error
    return tokenizer


def source_hash(name: str) -> str:
    """Return a hash of the source of the class's module, which changes with the class.

    Raises:
        UserError: there is no such class.
    """
    file = sys.modules[load_class(name).__module__].__file__
    assert file is not None, "a module of a package is a file"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
