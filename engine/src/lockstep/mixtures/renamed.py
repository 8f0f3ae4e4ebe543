"""Errors about a source of a mixture name its settings as the mixture does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from lockstep.errors import UserError
from lockstep.tokens.sources.source import Source


@contextmanager
def renamed(name: str, source_class: type[Source]) -> Iterator[None]:
    """Rename `data.source.SETTING` to `data.source.sources.NAME.SETTING` in a `UserError`.

    Args:
        name: the source's name.
        source_class: its class.
    """
    try:
        yield
    except UserError as error:
        known = "|".join(
            sorted((item.name for item in fields(source_class)), key=len, reverse=True)
        )
        place = rf"data.source.sources.{name}.\1"
        raise UserError(re.sub(rf"\bdata\.source\.({known})\b", place, str(error))) from error
