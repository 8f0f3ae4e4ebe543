"""Shared by tests that set up environments."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

# Creates an environment with this one's pip: installing a separate pip takes four seconds.
QUICK_VENV = """\
import pathlib, pip, sys, sysconfig
sys.path = [path for path in sys.path if path != str(pathlib.Path(__file__).parent)]
from venv import EnvBuilder
clear, folder = sys.argv[1:]
assert clear == "--clear"
EnvBuilder(clear=True, symlinks=True).create(folder)
packages = pathlib.Path(sysconfig.get_path("purelib", vars={"base": folder}))
(packages / "pip").symlink_to(pathlib.Path(pip.__file__).parent)
"""


@pytest.fixture
def quick_venv(tmp_path: Path) -> dict[str, str]:
    """Return environment variables with which Python creates virtual environments quickly."""
    if not [*importlib.metadata.distributions(name="pip")]:  # uv creates such environments
        return {}
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick/venv.py").write_text(QUICK_VENV)
    return {"PYTHONPATH": str(tmp_path / "quick")}
