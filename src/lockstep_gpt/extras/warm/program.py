"""The server as a program: it imports everything that it will fork, then waits for requests."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import NoReturn

from lockstep_gpt import processes
from lockstep_gpt.extras.warm import fork

# The modules that our forks run.
PROCESSES = [
    "lockstep_gpt.extras.warm.forking_agent",
    "lockstep_gpt.training.train",
]


def main(descriptor: str, *modules: str) -> NoReturn:
    """Run as a server that was started as a program."""
    connection = socket.socket(fileno=int(descriptor))
    connection.set_inheritable(False)
    fork.show()
    fork.before_imports = dict(os.environ)
    # Make torch count GPUs through NVML: an initialized driver does not survive a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with without_transformers():
        processes.import_all([*PROCESSES, *modules])
    fork.serve(connection)


@contextlib.contextmanager
def without_transformers() -> Iterator[None]:
    """Keep torchmetrics from importing transformers, if it is installed: that takes a second.

    torchmetrics imports it for two metrics; these are left out of `torchmetrics.text`, as if it
    were not installed. `from torchmetrics.text.bert import BERTScore` still imports it.
    """
    from lightning_utilities.core.imports import RequirementCache

    check = RequirementCache._check_available
    denied = []

    def denying(cache: RequirementCache) -> None:
        check(cache)
        if str(cache.requirement).startswith("transformers") and cache.available:
            cache.available = False
            denied.append(cache)

    RequirementCache._check_available = denying  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        RequirementCache._check_available = check  # type: ignore[method-assign]
        for cache in denied:
            del cache.available  # looked up again at the next access
        names = [name for name in sys.modules if name.startswith("torchmetrics.")]
        for name in names:  # modules imported without it are imported again on demand
            values = [*map(id, vars(sys.modules[name]).values())]
            if not hasattr(sys.modules[name], "__path__") and {*map(id, denied)} & {*values}:
                del sys.modules[name]


if __name__ == "__main__":
    main(*sys.argv[1:])
