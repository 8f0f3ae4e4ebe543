"""Errors about a source of a mixture name its settings as the mixture does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from lockstep_gpt.config import UserError, data_choices


@contextmanager
def renamed(name: str) -> Iterator[None]:
    """Rename `data.SETTING` to `data.sources.NAME.SETTING` in a source's `UserError`."""
    try:
        yield
    except UserError as error:
        settings = {item.name for own in data_choices().values() for item in fields(own)}
        known = "|".join(sorted(settings - {"root"}, key=len, reverse=True))
        text = re.sub(rf"\bdata\.({known})\b", rf"data.sources.{name}.\1", str(error))
        raise UserError(text) from error
