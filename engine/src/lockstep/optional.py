"""What only some settings need: the optional dependencies of pyproject.toml."""

import importlib
import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.errors import UserError

ENGINE = Path(__file__).resolve().parents[2]  # in a checkout, the folder of its pyproject.toml
CHECKOUT = Path(sys.prefix).parent
STAMP = Path(sys.prefix) / "set-up.sha256"  # scripts/dev.py writes it when it has set up .venv


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


def install_command(extra: str) -> str:
    """Return the command that adds an optional dependency to the environment of this process.

    An editable installation can only be repeated from its checkout, so its path is in the command.
    An environment of scripts/dev.py gets the pinned versions, and keeps them.
    """
    if STAMP.is_file():
        return f"python3 {_as_typed(CHECKOUT / 'scripts/dev.py')} install {extra}"
    if (ENGINE / "pyproject.toml").is_file():
        return f'{_installer()} -e "{_as_typed(ENGINE)}[{extra}]"'
    return f'{_installer()} "lightning-lockstep[{extra}]"'


def library_command(library: str) -> str:
    """Return the command that installs a library that no optional dependency names.

    An environment of scripts/dev.py keeps its pins: a file system's library wants the fsspec of
    its own version.
    """
    command = f"{_installer()} {library}"
    if STAMP.is_file():
        command += f" -c {_as_typed(CHECKOUT / 'constraints.txt')}"
    return command


def _as_typed(path: Path) -> Path:
    """Return a path as a person in this folder types it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


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
