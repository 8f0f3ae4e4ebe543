"""What only some settings need: optional dependencies of pyproject.toml, and extras."""

import importlib
import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep_gpt import PROGRAM
from lockstep.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
# scripts/dev.py writes this file when it has set up .venv.
STAMP = CHECKOUT / ".venv/set-up.sha256"


def import_optional(needed_by: str, module: str, extra: str) -> Any:
    """Import a library that is an optional dependency, and return the module.

    Args:
        needed_by: the setting or command that needs it, such as `logger=mlflow`.
        module: what to import, such as `pyarrow.parquet`.
        extra: the name in pyproject.toml's `optional-dependencies` that installs it.

    Raises:
        UserError: it is not installed, or it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        refuse_absent(needed_by, library, extra)
        reason = f"cannot be imported ({' '.join(str(error).split())})"
        raise UserError(
            f"{needed_by} needs {library}, which {reason}; run: {install_command(extra)}"
        ) from error


def refuse_absent(needed_by: str, library: str, extra: str) -> None:
    """Raise a `UserError` if a library is not installed; import nothing, which may take seconds."""
    if importlib.util.find_spec(library) is None:
        raise UserError(
            f"{needed_by} needs {library}, which is not installed; run: {install_command(extra)}"
        )


def import_of_extra(needed_by: str, extra: str, module: str) -> Any:
    """Import a module of an extra, which a project may not have, and return it.

    Args:
        needed_by: the setting or command that needs it, such as `init_from=gpt2`.
        extra: its folder in `extras`.
        module: its name in that folder.

    Raises:
        UserError: the extra is not here.
    """
    refuse_absent_extra(needed_by, extra)
    return importlib.import_module(f"lockstep_gpt.extras.{extra}.{module}")


def refuse_absent_extra(needed_by: str, extra: str) -> None:
    """Raise a `UserError` if this project doesn't have an extra."""
    if not has_extra(extra):
        raise UserError(
            f"{needed_by} needs the extra {extra}, which is not here; run: python3 scripts/dev.py "
            f"update --add {extra}"
        )


def has_extra(extra: str) -> bool:
    """Return whether this project has an extra."""
    return importlib.util.find_spec(f"lockstep_gpt.extras.{extra}") is not None


def install_command(extra: str) -> str:
    """Return the command that adds an optional dependency to the environment of this process.

    An editable installation can only be repeated from its checkout, so its path is in the command.
    An environment of scripts/dev.py gets the pinned versions, and keeps them.
    """
    checkout = Path() if Path.cwd() == CHECKOUT else CHECKOUT  # as the user can type it here
    if Path(sys.prefix) == STAMP.parent and STAMP.is_file():
        return f"python3 {checkout / 'scripts/dev.py'} install {extra}"
    if (CHECKOUT / "pyproject.toml").is_file():
        return f'{_installer()} -e "{checkout}[{extra}]"'
    return f'{_installer()} "{PROGRAM}[{extra}]"'


def library_command(library: str) -> str:
    """Return the command that installs a library that no optional dependency names.

    An environment of scripts/dev.py keeps its pins: a file system's library wants the fsspec of
    its own version.
    """
    command = f"{_installer()} {library}"
    if Path(sys.prefix) == STAMP.parent and STAMP.is_file():
        checkout = Path() if Path.cwd() == CHECKOUT else CHECKOUT
        command += f" -c {checkout / 'constraints.txt'}"
    return command


def _installer() -> str:
    """Return the start of a command that installs where this process imports from.

    scripts/dev.py does not activate .venv, so a bare `pip` may be another Python's.
    """
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    # Not `find_spec("pip")`: setuptools then takes its `distutils` away from this process.
    if not any(metadata.distributions(name="pip")):  # uv makes environments without it
        return f"uv pip install --python {python}"
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return "pip install"
    return f"{python} -m pip install"
