"""Five small tasks that need no download: from arithmetic, and from code that is held out."""

from __future__ import annotations

import ast
import keyword
import random
import re
from collections.abc import Iterator
from pathlib import Path

from lockstep_gpt.config import Config
from lockstep_gpt.data.sources.source import split_of_name
from lockstep_gpt.data.sources.stdlib import StandardLibrary
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.examples import CHOICE, CLOZE, EXACT, Example, Task

COUNT = 200  # examples of a task, at most
CHOICES = 4
SEED = 20  # of everything that is drawn
LINES_BEFORE = 2  # that the task `lines` shows
LONGEST = 30  # characters of a line that is a choice; `experiment=smoke` has a context of 32
SHORTEST = 6  # characters of such a line, or of a called name: shorter ones are too much alike
FEWEST_LETTERS = 5  # of a name to copy
CLOSE = 3  # choices differ in length by less than this
CLOSERS = {"(": ")", "[": "]", "{": "}"}


def builtin_tasks(config: Config) -> list[Task]:
    """Return the shipped tasks, the same for the same Python and held-out files.

    Raises:
        UserError: no file of the standard library is held out.
    """
    texts = held_out(config)
    words = {word for text in texts for word in re.findall(r"\b[a-z]{3,9}\b", text)}
    names = sorted(word for word in words if not keyword.iskeyword(word))
    made = {
        "add": (EXACT, _sums()),
        "brackets": (CHOICE, _brackets(names)),
        "calls": (CLOZE, _calls(texts)),
        "copy": (CHOICE, _copies(names)),
        "lines": (CHOICE, _next_lines(texts)),
    }
    return [
        Task(name, kind, tuple(examples), reports_cuts=False)
        for name, (kind, examples) in made.items()
    ]


def held_out(config: Config) -> list[str]:
    """Return the standard library's files that a run on it validates on, as text.

    Whether a file is held out depends on its name alone, so a model that was trained on another
    machine hasn't seen them either. Runs on other data use the default fraction.
    """
    data = config.data
    if not isinstance(data, StandardLibrary):
        data = StandardLibrary()
    fractions = data.val_fraction, data.test_fraction
    paths = [
        Path(file.path) for file in data.files if split_of_name(file.name, *fractions) == "val"
    ]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    texts = [text for text in texts if len([*_lines(text)]) > CHOICES]
    if not texts:
        raise UserError(
            f"data.val_fraction={data.val_fraction} holds out no file to make the builtin tasks "
            "from; name task files instead"
        )
    return texts


def _sums() -> list[Example]:
    """Add two digits, after two examples."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(SEED).shuffle(pairs)
    return [
        Example(((f"2 + 3 = 5\n9 + 4 = 13\n{a} + {b} = ", str(a + b)),), 0, ("\n",))
        for a, b in pairs
    ]


def _copies(names: list[str]) -> list[Example]:
    """Choose after which of four names, all equally long, a constructor assigns this one.

    The text to score is the same for all choices, so how common a name is doesn't matter.
    """
    draw = random.Random(SEED)
    longer = [name for name in names if len(name) >= FEWEST_LETTERS]
    examples: list[Example] = []
    while len(examples) < COUNT:
        name = draw.choice(longer)
        alike = [other for other in longer if len(other) == len(name) and other != name]
        if len(alike) >= CHOICES - 1:
            answer = draw.randrange(CHOICES)
            choices = draw.sample(alike, CHOICES - 1)
            choices.insert(answer, name)
            prompts = tuple((f"        self.{other} = ", f"{name}\n") for other in choices)
            examples.append(Example(prompts, answer))
    return examples


def _brackets(names: list[str]) -> list[Example]:
    """Close two or three nested brackets; all choices have the same length."""
    draw = random.Random(SEED)
    examples = []
    for number in range(COUNT):
        openers = [draw.choice("([{") for _ in range(2 + number % 2)]
        words = draw.sample(names, len(openers) + 1)
        inside = "".join(f"{opener}{word}" for opener, word in zip(openers, words[1:], strict=True))
        right = "".join(CLOSERS[closer] for closer in reversed(openers))
        wrong: set[str] = set()
        while len(wrong) < CHOICES - 1:
            wrong.add("".join(draw.choice(")]}") for _ in openers))
            wrong.discard(right)
        ends = [f"{closer}\n" for closer in sorted(wrong)]
        examples.append(_shuffled(draw, f"{words[0]} = {inside}", f"{right}\n", ends))
    return examples


def _calls(texts: list[str]) -> list[Example]:
    """Complete the name of what is called, of which half is given, up to the parenthesis."""
    calls = [call for text in texts for call in _calls_of(text)]
    random.Random(SEED).shuffle(calls)
    return [Example((call,)) for call in calls[:COUNT]]


def _calls_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield each call in two parts: its line up to half of the name, and the rest with `(`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # code for another Python
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not lines[node.lineno - 1].isascii():
            continue  # the tree counts bytes
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        line = lines[(node.func.end_lineno or 1) - 1]
        end = node.func.end_col_offset or 0
        if len(name) > SHORTEST and line[end : end + 1] == "(":
            cut = end - len(name) // 2
            yield line[:cut], line[cut : end + 1]


def _next_lines(texts: list[str]) -> list[Example]:
    """Choose which line follows two lines of a file; the others are from elsewhere, as long."""
    draw = random.Random(SEED)
    files = [[*_lines(text)] for text in texts]
    places = [(file, at) for file in files for at in range(LINES_BEFORE, len(file))]
    draw.shuffle(places)
    everything = sorted({line for file in files for line in file if _is_choice(line)})
    examples: list[Example] = []
    for file, at in places:
        before = file[at - LINES_BEFORE : at]
        right = file[at]
        if len(examples) == COUNT or not _is_choice(right):
            continue
        known = {*before, right}
        alike = [line for line in everything if abs(len(line) - len(right)) < CLOSE]
        alike = [line for line in alike if line not in known]
        if len(alike) >= CHOICES - 1:
            wrong = [f"{line}\n" for line in draw.sample(alike, CHOICES - 1)]
            context = "".join(f"{line}\n" for line in before)
            examples.append(_shuffled(draw, context, f"{right}\n", wrong))
    return examples


def _lines(text: str) -> Iterator[str]:
    return (line.rstrip() for line in text.splitlines() if line.strip())


def _is_choice(line: str) -> bool:
    return len(line.strip()) >= SHORTEST and len(line) <= LONGEST


def _shuffled(draw: random.Random, context: str, right: str, wrong: list[str]) -> Example:
    """Return an example with the right choice at a random place."""
    choices = [*wrong]
    answer = draw.randrange(len(wrong) + 1)
    choices.insert(answer, right)
    return Example(tuple((context, choice) for choice in choices), answer)
