"""The server as a program: it imports everything that it will fork, then waits for requests."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from lockstep_gpt import processes
from lockstep_gpt.extras.warm import fork
from lockstep_gpt.extras.warm.import_patches import without_transformers

# The modules that our forks run.
PROCESSES = [
    "lockstep_gpt.extras.warm.forking_agent",
    "lockstep_gpt.training.train",
]


def main(descriptor: str, parent: str, *modules: str) -> NoReturn:
    """Run as a server that was started as a program."""
    fork.end_with(int(parent))  # before the imports, which take seconds
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    fork.show_command_line()
    fork.before_imports = dict(os.environ)
    # Make torch count GPUs through NVML: an initialized driver does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with without_transformers():
        processes.import_all([*PROCESSES, *modules])
    fork.serve(connection)


if __name__ == "__main__":
    main(*sys.argv[1:])
