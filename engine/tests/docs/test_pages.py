"""Pages quote the program's messages exactly."""

import ast
import functools
import re
from pathlib import Path

import pytest
from lockstep_gpt import PROJECT

PROGRAM = PROJECT.program

ROOT = Path(__file__).parents[3]
CONSOLE = re.compile(r"^\$ \S+ (.+)\n(.+)$", re.MULTILINE)  # a command, and the line that it prints

OURS = re.compile(r"(; to [a-z ]+: ).+ train run_dir=")  # the command of this installation


TROUBLES = (ROOT / "docs/troubleshooting.md").read_text("utf-8")


def blocks(text, language):
    """Return the lines of all blocks of a language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


COMMAND_AT_END = re.compile(r"(to continue|to start over): .*")


@functools.cache
def sayings():
    """Return a pattern for each text of the source, with a wildcard for each value."""
    return list(_sayings())


def _sayings():
    for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("engine/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [re.sub(r"%[*\d.]*[sd]", "\0", node.value)]
            else:
                continue
            text = "".join(parts).strip()
            if len(text.replace("\0", "")) > 8:
                yield re.compile(re.escape(text).replace("\0", ".*?"))


@pytest.mark.slow
@pytest.mark.parametrize("line", blocks(TROUBLES, "text"))
def test_every_quoted_message_is_in_the_source(line):
    line = COMMAND_AT_END.sub(r"\1", line)  # the source has its parts, not all of it
    spoken = [match for each in sayings() for match in each.finditer(line)]
    covered = {place for match in spoken for place in range(*match.span())}
    assert len(covered) > 0.6 * len(line), line


@pytest.mark.usefixtures("quick_ranks")
def test_errors_are_quoted_exactly(story):
    shown = CONSOLE.findall("\n".join(blocks(TROUBLES, "console")))
    assert len(shown) > 1
    told = story([line for line, _ in shown], inline=False)
    for (line, expected), (status, screen) in zip(shown, told, strict=True):
        assert status in (1, 2), line
        assert OURS.sub(rf"\1{PROGRAM} train run_dir=", screen.splitlines()[-1]) == expected
