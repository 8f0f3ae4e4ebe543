import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def load():
    spec = importlib.util.spec_from_file_location("planted", ROOT / "scripts/environments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_has_the_pins_of_pip():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    listed = tomllib.loads(project)["tool"]["uv"]["constraint-dependencies"]
    remedy = "python3 scripts/dev.py pins writes them"
    assert listed == [line for line in pins.splitlines() if "==" in line], remedy
    assert load().with_pins(project, pins) == project, remedy


def test_other_pins_are_written_and_nothing_else():
    project = 'a = 1\nconstraint-dependencies = [\n    "old==1",\n]\nb = [2]\n'
    text = load().with_pins(project, "# Words.\nnew==2\nmore==3\n")
    listed = '    "new==2",\n    "more==3",\n'
    assert text == f"a = 1\nconstraint-dependencies = [\n{listed}]\nb = [2]\n"


def test_a_command_writes_them(tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("dev.py", "environments.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("constraint-dependencies = [\n]\n")
    (tmp_path / "constraints.txt").write_text("new==2\n")
    words = [sys.executable, str(tmp_path / "scripts/dev.py"), "pins"]
    subprocess.run(words, check=True)
    text = (tmp_path / "pyproject.toml").read_text()
    assert text == 'constraint-dependencies = [\n    "new==2",\n]\n'
    assert subprocess.run([*words, "all"], capture_output=True).returncode == 2
