"""Records where a run happens: `environment.json` in its directory."""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer

from lockstep_gpt.config import Config
from lockstep_gpt.extras.pages.recordings import as_json
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.run.loggers.tracking import git_state
from lockstep_gpt.whole_files import replace_text

LIBRARIES = ("lightning", "hydra-core", "numpy")


class RecordEnvironment(Callback):
    """Writes the environment when training starts, on rank 0 only."""

    def __init__(self, directory: RunDirectory) -> None:
        self.path = directory.path / "environment.json"

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            replace_text(self.path, as_json(environment(pl_module.device)))


def environment(device: torch.device) -> dict[str, Any]:
    """Return this rank's host, device, library versions, and git state."""
    name = platform.machine()
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    libraries = {library: version(library) for library in LIBRARIES}
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()}",
        "device": name,
        "processors": os.cpu_count(),
        "threads of rank 0": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # with its build, as in 2.13.0+cpu
        **libraries,
        **git_state(Path(__file__).parent),
    }


def callbacks(
    _config: Config, directory: RunDirectory, _rank: int, _terminal: Any
) -> list[Callback]:
    """Return the callback of every run."""
    return [RecordEnvironment(directory)]
