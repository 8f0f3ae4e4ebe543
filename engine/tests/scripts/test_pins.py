import importlib.util
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def load():
    spec = importlib.util.spec_from_file_location("pins", ROOT / "scripts/pins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_has_the_pins_of_pip():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    listed = tomllib.loads(project)["tool"]["uv"]["constraint-dependencies"]
    remedy = "python3 scripts/pins.py writes them"
    assert listed == [line for line in pins.splitlines() if "==" in line], remedy
    assert load().agreeing(project, pins) == project, remedy


def test_other_pins_are_written_and_nothing_else():
    project = 'a = 1\nconstraint-dependencies = [\n    "old==1",\n]\nb = [2]\n'
    text = load().agreeing(project, "# Words.\nnew==2\nmore==3\n")
    listed = '    "new==2",\n    "more==3",\n'
    assert text == f"a = 1\nconstraint-dependencies = [\n{listed}]\nb = [2]\n"
