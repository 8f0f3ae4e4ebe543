"""The page of documentation: its commands run, its tables are true."""

import inspect
import re
import shlex
from pathlib import Path

from lockstep_gpt.seeing.page import write_page
from lockstep_gpt.seeing.panel import panel
from lockstep_gpt.seeing.sync_panel import SyncPanel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sync_panel.md").read_text(encoding="utf-8")
TRAIN, SHOW = re.findall(r"^lockstep-gpt (.+)$", PAGE, flags=re.MULTILINE)


def test_its_commands_run_one_after_the_other(command):
    command(*shlex.split(TRAIN), f"data.root={command.data_root}")
    assert "panel.html" in command(*shlex.split(SHOW)).stdout
    assert (command.folder / "runs/seen/panel.html").stat().st_size > 100_000


def test_its_settings_and_defaults_are_those_of_the_callback():
    rows = re.findall(r"^\| (`\+?[^|]+) \| ([\d., ]+) \|", PAGE, flags=re.MULTILINE)
    said = {}
    for names, values in rows:
        said |= dict(zip(re.findall(r"\w+", names), values.split(", "), strict=True))
    parameters = inspect.signature(SyncPanel).parameters.values()
    assert said == {each.name: str(each.default) for each in parameters}


def test_its_keys_are_those_of_the_page(show, recorded, tmp_path):
    write_page(tmp_path / "panel.html", panel(recorded[0]))
    footer = show(tmp_path / "panel.html").locator("footer kbd").all_inner_texts()
    keys = re.findall(
        r"^\| ([^|]+) \| [^|]+ \|$", PAGE.split("| key |")[1].split("##")[0], re.MULTILINE
    )
    assert " ".join(keys).replace(" to ", " ").split() == footer


def test_its_picture_is_there_and_small():
    picture = ROOT / "docs" / re.findall(r"!\[.+\]\((.+)\)", PAGE)[0]
    assert 10_000 < picture.stat().st_size < 150_000
