"""A run's frozen configuration as text: it shows whether it is whole."""

import json
from pathlib import Path
from typing import Any

import yaml

from lockstep.damaged_files import readable
from lockstep.errors import UserError

# Its first and last line; a copy that was cut off has only the first.
BEGIN = "# The run's frozen configuration\n"
END = "# The end of the frozen configuration\n"


def frozen_text(values: dict[str, Any]) -> str:
    """Return the text of a frozen file with these values."""
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"{BEGIN}{text}{END}"


def read_frozen(path: Path) -> dict[str, Any]:
    """Return the values in a run's `config.yaml`.

    Raises:
        UserError: the file is missing, unreadable, or damaged.
    """
    with readable(path):
        if not path.exists():
            raise UserError(f"{path.parent} is not a run directory: it has no {path.name}")
        content = path.read_bytes()
    try:
        return _whole_values(content.decode())
    except (yaml.YAMLError, AttributeError, TypeError, ValueError, RecursionError):
        raise UserError(f"{path} is damaged; restore the original") from None


def _whole_values(text: str) -> dict[str, Any]:
    """Return the values in the text of a frozen file, or raise a `ValueError` if some are cut."""
    values = dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    if text.startswith(BEGIN) and END not in text:
        raise ValueError("some values are missing")
    json.dumps(values, default=str)  # a ValueError if they contain themselves
    return values
