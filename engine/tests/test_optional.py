import re
import shutil
import sys
from pathlib import Path

import pytest

from lockstep import optional
from lockstep.errors import UserError
from lockstep.optional import import_optional, install_command

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _not_of_dev_py(monkeypatch, tmp_path):
    """Pretend that scripts/dev.py has not made this environment."""
    monkeypatch.setattr(optional, "STAMP", tmp_path / "no-stamp")


@pytest.fixture
def _active(monkeypatch):
    """Make `pip` the one of this Python, as in an activated environment."""
    pip = str(Path(sys.executable).parent / "pip")
    monkeypatch.setattr(shutil, "which", lambda name: pip if name == "pip" else None)


@pytest.mark.usefixtures("_active")
def test_a_missing_library_is_named_with_the_setting_and_the_command(monkeypatch):
    monkeypatch.chdir(ROOT)
    line = 'data=no needs no_such, which is not installed; run: pip install -e "engine[zstd]"'
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        import_optional("data=no", "no_such.module", "zstd")


def test_a_library_that_cannot_be_imported_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("from json import nothing_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    line = r"which cannot be imported \(cannot import name 'nothing_there' from 'json'.*\); run: "
    with pytest.raises(UserError, match=line):
        import_optional("data=no", "broken_library", "zstd")


@pytest.mark.usefixtures("_active")
def test_the_command_works_in_any_folder_and_without_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert install_command("zstd") == f'pip install -e "{ROOT}/engine[zstd]"'
    monkeypatch.setattr(optional, "ENGINE", tmp_path)
    assert install_command("zstd") == 'pip install "lightning-lockstep[zstd]"'


def test_the_command_installs_for_this_python_if_its_environment_is_not_active(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv/bin/python"))
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/pip")
    assert install_command("zstd") == '.venv/bin/python -m pip install -e "engine[zstd]"'
    monkeypatch.chdir(tmp_path)
    assert install_command("zstd").startswith(f"{ROOT}/.venv/bin/python -m pip install -e")


def test_an_environment_of_uv_has_no_pip(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv/bin/python"))
    monkeypatch.setattr(optional.metadata, "distributions", lambda **_: [])
    expected = 'uv pip install --python .venv/bin/python -e "engine[zstd]"'
    assert install_command("zstd") == expected


def test_an_environment_of_dev_py_is_extended_by_dev_py(monkeypatch, tmp_path):
    (tmp_path / "set-up.sha256").touch()
    monkeypatch.setattr(optional, "STAMP", tmp_path / "set-up.sha256")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert install_command("zstd") == "python3 scripts/dev.py install zstd"
    monkeypatch.chdir(tmp_path)
    assert install_command("zstd") == f"python3 {ROOT}/scripts/dev.py install zstd"
