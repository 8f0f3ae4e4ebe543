"""Values on the command line that Hydra's grammar can read only with quotes around them."""

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

PATHS = {
    *("resume", "run_dir", "model.init_from", "checkpoint.copy_to"),
    *("data.root", "data.path", "data.val_path", "data.test_path"),
}
TEXTS = {*PATHS, "run_name"}
# Hydra would read a number, and write 1e3 as 1000.0 and 1.10 as 1.1.
NUMBER = re.compile(r"[-+]?[\d._]*\d[\d._]*(e[-+]?[\d_]+)?", re.IGNORECASE)
# What a path may contain, but has no meaning in Hydra's grammar, or another one.
ODD = re.compile(r"[^\x00-\x7f]|[=#;&!^<>`'\"\[\]]|(?<!\$)\{")
LINE_BREAKS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


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


def unparsed_line(word: str) -> str:
    """Return that Hydra can't parse NAME=VALUE, and how to quote the value as text."""
    if "=" not in word:
        rule = "write NAME=VALUE, without spaces"
        if word.endswith((".py", ".yaml", ".yml")):  # as nanoGPT takes them
            rule += "; a file of settings in configs/experiment/ is chosen with experiment=NAME"
        return f"{_on_one_line(word)} has no value; {rule}"
    name, _, value = word.partition("=")
    if name in PATHS and value.startswith("~/"):
        return f"{word}: shells replace ~ only before a word; write {name}=$HOME{value[1:]}"
    if value.endswith(","):
        return f"{word} ends with a comma; write values without spaces, as in {name}=A,B"
    if " " in word and all("=" in part for part in word.split()):
        return f"{word} is one word with several settings; write each as its own word"
    quoted = quote_value(word)
    try:
        OverridesParser.create().parse_override(quoted)
    except HydraException:  # the name is at fault
        return f"{_on_one_line(word)} is not NAME=VALUE; names have letters, digits, and dots"
    in_shell = shlex.quote(quoted)
    if quoted != _on_one_line(quoted):
        escaped = quoted.replace("\\", r"\\").replace("'", r"\'")
        in_shell = f"$'{_on_one_line(escaped)}'"
    return (
        f"{_on_one_line(word)} cannot be parsed; to set it to this text, quote it for the shell "
        f"and for Hydra: {in_shell}"
    )


def _on_one_line(text: str) -> str:
    for character, escaped in LINE_BREAKS.items():
        text = text.replace(character, escaped)
    return text
