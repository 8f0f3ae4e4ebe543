"""Runs the commands of the README and the documentation: a page's in order, in one process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Runs commands one after another, as the program would; imports take seconds and happen once.
# Prints the exit status and the output of each.
TELL = """
import json, os, sys, tempfile
import lockstep_gpt
from lockstep import commands as cli
screen, told = os.dup(1), []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            status = cli.main(words)
        except SystemExit as end:
            status = end.code
        sys.stdout.flush(), sys.stderr.flush()
        file.seek(0)
        told.append((status, file.read().decode()))
os.write(screen, json.dumps(told).encode())
"""
# The tutorial's own experiment.
EXPERIMENT = re.compile(
    r"`configs/experiment/books\.yaml`:\n\n```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# It trains for a minute, of which a few steps show all that tests check. You may have a file of its
# name with other settings, so tests use another name.
BOOKS = "experiment=books"
OF_TESTS = ["experiment=books_of_tests", "max_steps=20", "val_every=20"]
# Overrides with which a run on one device needs no separate process.
INLINE = ["launch.inline=true", "trainer.accelerator=cpu", "trainer.devices=1"]


def write_tutorial_files(folder: Path) -> None:
    """Write the text and the experiment that the tutorial makes, as its reader would."""
    tutorial = (ROOT / "docs/tutorial.md").read_text("utf-8")
    (books,) = re.findall(r"^python3 (-c .+)$", tutorial, flags=re.MULTILINE)
    subprocess.run([sys.executable, *shlex.split(books)], cwd=folder, check=True)
    (settings,) = EXPERIMENT.findall(tutorial)
    path = folder / "configs/experiment/books_of_tests.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(settings, encoding="utf-8")


def with_tutorial_files(folder: Path, words: list[str]) -> list[str]:
    """Return words that use the tutorial's experiment in the folder, if they name it."""
    if BOOKS not in words:
        return words
    others = [word for word in words if word != BOOKS]
    return [*others, *OF_TESTS, f"--config-dir={folder / 'configs'}"]


class Story:
    """Runs the lines of a page in one folder, which has the run of all pages, runs/first."""

    def __init__(self, command, finished, python: str) -> None:
        self.command, self.python = command, python
        shutil.copytree(finished[0].folder / "runs/first", command.folder / "runs/first")
        write_tutorial_files(command.folder)
        shutil.copytree(command.folder / "data/books", command.folder / "books")  # of other pages
        text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
        lines = [json.dumps({"body": line}) for line in text.splitlines()[:400] if line]
        (command.folder / "notes.jsonl").write_text("\n".join(lines))

    def __call__(self, lines: list[str], inline: bool = True) -> list[tuple[int, str]]:
        """Return the exit status and the output of each line, without the program's name.

        If they train in their process, it is a separate one: wandb keeps state in a process.
        """
        words = [self._words(shlex.split(line), inline) for line in lines]
        if not inline:
            results = [self.command.run(*arguments) for arguments in words]
            return [(status, out + err) for status, out, err in results]
        script = [self.python, "-c", TELL, json.dumps(words)]
        status, out, err = self.command.run_words(script)
        assert status == 0, err
        return [(code, screen) for code, screen in json.loads(out)]

    def _words(self, words: list[str], inline: bool) -> list[str]:
        if words[0] not in ("train", "prepare"):
            return words
        goes_on = "resume=auto" in words
        words += [] if goes_on else [f"data.root={self.command.data_root}"]
        words = with_tutorial_files(self.command.folder, words)
        if not inline or words[0] == "prepare":
            return words
        own = any(word.startswith(("logger", "hydra/", "resume=auto")) for word in words)
        words += [] if own else ["logger=none"]
        shown = any(word.startswith("callbacks") for word in words)  # else short samples are enough
        words += [] if shown or goes_on else ["callbacks.sample.length=9"]
        alone = not any(word.startswith("trainer.devices=") for word in words)
        return [*words, *(INLINE if alone else [])]


@pytest.fixture
def tutorial_words() -> Callable[[Path, list[str]], list[str]]:
    """Write the tutorial's files into a folder; return a command's words, changed to use them."""

    def write(folder: Path, words: list[str]) -> list[str]:
        if BOOKS in words:
            write_tutorial_files(folder)
        return with_tutorial_files(folder, words)

    return write


@pytest.fixture
def story(command, finished, python_of_forks):
    return Story(command, finished, python_of_forks)
