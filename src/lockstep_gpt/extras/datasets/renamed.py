"""Errors about a source of a mixture name its settings as the mixture does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from lockstep_gpt.errors import UserError
from lockstep_gpt.tokens.data_settings import DataConfig


@contextmanager
def renamed(name: str, source_class: type[DataConfig]) -> Iterator[None]:
    """Rename `data.SETTING` to `data.sources.NAME.SETTING` in a `UserError` of a source.

    Args:
        name: the source's name.
        source_class: its class.
    """
    try:
        yield
    except UserError as error:
        settings = [item.name for item in fields(source_class) if item.name != "root"]
        known = "|".join(sorted(settings, key=len, reverse=True))
        text = re.sub(rf"\bdata\.({known})\b", rf"data.sources.{name}.\1", str(error))
        raise UserError(text) from error
