"""The settings page equals its script's output for the schema and the available choices."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lockstep_gpt.catalog import CATALOG
from lockstep_gpt.config import Config, groups
from lockstep_gpt.data.data_settings import data_choices
from lockstep_gpt.registry import installed
from lockstep_gpt.settings import setting

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/settings.md"
PRINT = """
import settings
print(settings.page(), end="")
"""


@pytest.fixture(scope="module")
def settings():
    spec = importlib.util.spec_from_file_location("settings", ROOT / "scripts/settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not PAGE.is_file(), reason="no docs/settings.md here")
def test_the_page_has_nothing_outdated_else_run_its_script():
    # In a separate process: the output would include sources that other tests import or create.
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT / "scripts")])
    made = subprocess.run(
        [sys.executable, "-c", PRINT],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    parts = re.split(r"\n(?=## Extra `)", PAGE.read_text("utf-8"))
    # Whoever deletes an extra by hand may leave its section.
    absent = tuple(f"## Extra `{name}`" for name in {*CATALOG} - {*installed()})
    current = "\n".join(part for part in parts if not part.startswith(absent))
    # What you have added may be missing: writing a recipe is everyday work.
    stale = Counter(current.splitlines()) - Counter(made.stdout.splitlines())
    assert not stale, "`python3 scripts/dev.py docs` writes it"


def test_every_setting_is_read_somewhere():
    files = [path for path in (ROOT / "src").rglob("*.py") if path.name != "config.py"]
    sources = "\n".join(path.read_text("utf-8") for path in files)
    owners = {Config, *groups().values(), *data_choices().values()}
    names = {item.name for owner in owners for item in dataclasses.fields(owner)}
    names.remove("of_extras")  # the groups of extras, no setting
    read = {*re.findall(r"\.(\w+)", sources), *re.findall(r"\[?\"(\w+)\"", sources)}
    assert names - read == set()


def test_a_setting_s_row_has_its_default_its_choices_and_its_meaning(settings):
    @dataclasses.dataclass
    class Engine(Config):
        node = "engine"
        power: float | None = setting("of the engine", None, above=0, at_most=9)
        fuel: str = setting("what it burns", choices=("oil", "gas"))

    rows = [settings.setting_row(Engine, item) for item in settings.own_fields(Engine)]
    assert rows == [
        ("`engine.power`", "`null`", "of the engine"),
        ("`engine.fuel`", "", "`oil`, `gas`: what it burns"),
    ]


def test_a_line_of_yaml_gives_name_value_and_comment(settings, tmp_path):
    file = tmp_path / "boat.yaml"
    file.write_text("_target_: a.B\nsail:\n  area: 12 # square metres | none\n  colour: 'red '\n")
    assert list(settings.listed(file, "boats")) == [
        ("`boats.sail.area`", "`12`", "square metres, none"),
        ("`boats.sail.colour`", "`red `", ""),
    ]
