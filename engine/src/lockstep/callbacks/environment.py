"""Records where a run happens: `environment.json` in its directory."""

from __future__ import annotations

import json
import os
import platform
import socket
from importlib.metadata import version
from typing import Any

import torch
from lightning import Callback, Trainer

from lockstep import project, variables
from lockstep.loggers.tracking import git_state
from lockstep.run.run import Run
from lockstep.whole_files import replace_text

LIBRARIES = ("lightning", "hydra-core", "numpy")


class RecordEnvironment(Callback):
    """Writes the environment when training starts, on rank 0 only."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            text = json.dumps(environment(pl_module.device), indent=2) + "\n"
            replace_text(Run.current().directory.environment, text)


def environment(device: torch.device) -> dict[str, Any]:
    """Return this rank's host, device, library versions, variables, and git state."""
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
        "variables": variables.shown(),
        **git_state(project.folder()),
    }
