"""Keeps a run directory from someone else from running code that only its config.yaml names."""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from lockstep_gpt import PROGRAM
from lockstep_gpt.config_files import config_folders
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import RunDirectory, flat, some_of

# Only classes, not all that is reachable: `torch.serialization.os.system` isn't part of torch.
PUBLIC = r"lightning\.pytorch\.(callbacks|loggers|plugins|profilers|strategies)\.[A-Z]\w*"


def foreign(values: dict[str, Any]) -> list[str]:
    """Return settings of targets that neither configs/ nor Lightning has, and all references."""
    files = (path for folder in config_folders() for path in folder.rglob("*.yaml"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    ours, settings = re.findall(r"_target_: (\S+)", "".join(texts)), [*flat(values)]
    nodes = tuple(
        name.removesuffix("_target_")
        for name, value in settings
        if re.search(r"\$\{|_target_", str(value))
        or (name.endswith("_target_") and not (value in ours or re.fullmatch(PUBLIC, str(value))))
    )
    return [f"{name}={value}" for name, value in settings if name.startswith(nodes)]


def permit(run: RunDirectory, trusted: bool, composed: dict[str, Any] | None = None) -> None:
    """Record for this user that `run` may build what it names; if not, raise a `UserError`."""
    settings = foreign(run.values())
    # `Path.expanduser` would raise if there is no home.
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    record = Path("/", state, PROGRAM, "built", digest)
    if not (trusted or {*settings} <= {*foreign(composed or {})} or os.access(record, os.F_OK)):
        raise UserError(
            f"run_dir={run.path}: its config.yaml has {some_of(settings)}, which no run that you "
            "started here has used; if you trust its author, set trust_run_dir=true"
        )
    if settings:
        with contextlib.suppress(OSError):  # without a record, commands need trust_run_dir again
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()
