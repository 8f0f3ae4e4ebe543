"""The documentation page: its commands run, and its tables are true."""

import inspect
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep.pages.panel import panel_page
from lockstep.pages.sync_panel import SyncPanel
from lockstep.whole_files import write_output

FILE = Path(__file__).parents[3] / "engine/docs/commands.md"
PAGE = FILE.read_text(encoding="utf-8").partition("\n## Report\n")[2]  # and the panel
MADE = ("comparison.html", "runs/seen/panel.html")


@pytest.mark.slow
def test_commands_run_one_after_the_other(command, finished):
    short = [f"data.root={command.data_root}", "callbacks.sample.length=9"]
    for line in re.findall(r"^my-gpt (.+)$", PAGE, flags=re.MULTILINE):
        if line == "train experiment=smoke run_dir=runs/example":
            # The README's first run: all tests share it.
            shutil.copytree(finished[0].folder / "runs/first", command.folder / "runs/example")
        elif line.startswith("train "):
            command(*shlex.split(line), *short)
        else:
            command(*shlex.split(line))
    assert all((command.folder / name).stat().st_size > 20_000 for name in MADE)


def test_settings_and_defaults_are_those_of_the_callback():
    rows = re.findall(r"^\| (`\+?[^|]+) \| ([\d., ]+) \|", PAGE, flags=re.MULTILINE)
    defaults = {}
    for names, values in rows:
        defaults |= dict(zip(re.findall(r"\w+", names), values.split(", "), strict=True))
    parameters = inspect.signature(SyncPanel).parameters.values()
    declared = {parameter.name: str(parameter.default) for parameter in parameters}
    assert defaults == declared


@pytest.mark.slow
def test_keys_are_those_of_the_page(show, recorded, tmp_path):
    write_output(tmp_path / "panel.html", panel_page(recorded[0]))
    footer = show(tmp_path / "panel.html").locator("footer kbd").all_inner_texts()
    keys = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", PAGE.split("| key |")[1].split("| setting")[0], re.MULTILINE
    )
    assert " ".join(keys).replace(" to ", " ").split() == footer


def test_the_pictures_are_there_and_small():
    pictures = re.findall(r"!\[.+\]\((.+)\)", PAGE)
    assert len(pictures) == len(MADE)
    assert all(10_000 < (FILE.parent / name).stat().st_size < 150_000 for name in pictures)
