"""Lets `--help` and completion list the choices that a program's main file adds.

Hydra itself reads `hydra.searchpath` only when it composes.
"""

import sys
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class LockstepSearchPath(SearchPathPlugin):
    """Adds the search path of the `lockstep.main` program that runs; to others, nothing."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the entries, so that the program's own files win."""
        composed: Any = sys.modules.get("lockstep.launch.composed")
        for place in composed.search_path_of_call if composed is not None else ():
            search_path.append(provider="lockstep", path=place)
