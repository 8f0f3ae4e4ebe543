"""Values on the command line that Hydra's grammar can read only with quotes around them."""

import re

PATHS = {
    *("resume", "run_dir", "model.init_from", "checkpoint.copy_to"),
    *("data.root", "data.path", "data.val_path", "data.test_path"),
}
TEXTS = {*PATHS, "run_name"}
# Hydra would read a number, and write 1e3 as 1000.0 and 1.10 as 1.1.
NUMBER = re.compile(r"[-+]?[\d._]*\d[\d._]*(e[-+]?[\d_]+)?", re.IGNORECASE)
# What a path may contain, but has no meaning in Hydra's grammar, or another one.
ODD = re.compile(r"[^\x00-\x7f]|[=#;&!^<>`'\"\[\]]|(?<!\$)\{")


def quote_texts(arguments: list[str]) -> list[str]:
    """Quote texts that Hydra could not parse, or would read as a number and so change.

    Examples are the paths `step=000500.ckpt` and `größe`, and the name `1e3`.
    """
    return [_with_quoted_text(word) for word in arguments]


def _with_quoted_text(word: str) -> str:
    name, _, value = word.partition("=")
    is_odd_path = name in PATHS and ODD.search(value)
    is_number = name in TEXTS and NUMBER.fullmatch(value)
    if (is_odd_path or is_number) and not value.startswith(("'", '"')):
        return quote_value(word)
    return word


def quote_value(word: str) -> str:
    """Return NAME=VALUE with Hydra's quotes around the value, which is then any text."""
    name, _, value = word.partition("=")
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)  # backslashes before the last quote
    return f'{name}="{escaped}"'
