"""The documentation pages: their commands run, and their tables are true."""

import inspect
import re
import shlex
import shutil
from pathlib import Path

import pytest

from lockstep_gpt.extras.pages.panel import panel_page
from lockstep_gpt.extras.pages.sync_panel import SyncPanel
from lockstep_gpt.whole_files import write_output

ROOT = Path(__file__).parents[3]
NAMES = ("pages_report", "pages_panel")
lost = [name for name in NAMES if not (ROOT / f"docs/{name}.md").is_file()]
if lost:
    pytest.skip(f"no docs/{lost[0]}.md here", allow_module_level=True)
PAGE = (ROOT / "docs/pages_panel.md").read_text(encoding="utf-8")
MADE = {"pages_report": "comparison.html", "pages_panel": "runs/seen/panel.html"}


def text_of(name):
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_commands_run_one_after_the_other(name, command, finished):
    short = [f"data.root={command.data_root}", "callbacks.sample.length=9"]
    for line in re.findall(r"^lockstep-gpt (.+)$", text_of(name), flags=re.MULTILINE):
        if line == "train experiment=smoke run_dir=runs/example":
            # The README's first run: all tests share it.
            shutil.copytree(finished[0].folder / "runs/first", command.folder / "runs/example")
        elif line.startswith("train "):
            command(*shlex.split(line), *short)
        else:
            command(*shlex.split(line))
    assert (command.folder / MADE[name]).stat().st_size > 20_000


def test_settings_and_defaults_are_those_of_the_callback():
    rows = re.findall(r"^\| (`\+?[^|]+) \| ([\d., ]+) \|", PAGE, flags=re.MULTILINE)
    defaults = {}
    for names, values in rows:
        defaults |= dict(zip(re.findall(r"\w+", names), values.split(", "), strict=True))
    parameters = inspect.signature(SyncPanel).parameters.values()
    assert defaults == {parameter.name: str(parameter.default) for parameter in parameters}


def test_keys_are_those_of_the_page(show, recorded, tmp_path):
    write_output(tmp_path / "panel.html", panel_page(recorded[0]))
    footer = show(tmp_path / "panel.html").locator("footer kbd").all_inner_texts()
    keys = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", PAGE.split("| key |")[1].split("##")[0], re.MULTILINE
    )
    assert " ".join(keys).replace(" to ", " ").split() == footer


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_there_and_small(name):
    picture = ROOT / "docs" / re.findall(r"!\[.+\]\((.+)\)", text_of(name))[0]
    assert 10_000 < picture.stat().st_size < 150_000
