"""A script is a project if `lockstep.main` decorates one of its functions."""

import re
import sys

import pytest

from lockstep.errors import UserError
from lockstep.launch.script import project_of

FUNCTION = "def train(cfg, run): ...\n"


@pytest.fixture
def written(tmp_path):
    """Write a script; return its path."""

    def write(text):
        path = tmp_path / "run me.py"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        f"import lockstep\n@lockstep.main('../conf', 'base')\n{FUNCTION}",
        "import lockstep as own\n@own.main(config_name='base.yaml', config_path='../conf')\n"
        + FUNCTION,
        f"from lockstep import Run, main\n@main('../conf', config_name='base')\n{FUNCTION}",
        f"from lockstep import main as start\n@start('../conf', 'base', '1.3')\n{FUNCTION}",
    ],
)
def test_its_settings_and_its_function_are_read_without_importing_it(text, written):
    path = written(f"raise SystemExit\n{text}")
    project = project_of(path)
    assert project.configs.resolve() == path.parent.parent / "conf"
    assert project.config_name == "base"
    assert project.train == f"{path}:train"
    assert project.command("train", "seed=2") == [sys.executable, str(path), "seed=2"]
    assert project.command("doctor")[1:] == ["-m", "lockstep", "doctor", str(path)]
    assert project.typed("check") == f"lockstep check '{path}'"
    assert project.typed("train") == f"python '{path}'"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import lockstep\n", "decorates none of its functions"),
        (f"import hydra\n@hydra.main('conf', 'base')\n{FUNCTION}", "decorates none"),
        (2 * f"import lockstep\n@lockstep.main('conf', 'base')\n{FUNCTION}", "decorates 2 of"),
        (f"import lockstep\n@lockstep.main(FOLDER, 'base')\n{FUNCTION}", "line 2: config_path of"),
        (f"import lockstep\n@lockstep.main('conf')\n{FUNCTION}", "line 2: config_name of"),
        ("def train(:\n", "line 1: invalid syntax"),
        ("\0", "source code string cannot contain null bytes"),
    ],
)
def test_what_is_no_program_is_refused_in_one_line(text, why, written):
    path = written(text)
    with pytest.raises(UserError, match=re.escape(why)) as refused:
        project_of(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"missing.py can't be read: .*; name the program's file"):
        project_of(tmp_path / "missing.py")
