"""Lets Hydra compose this project's configuration in any program; Hydra finds it by its folder.

The settings of the project are classes, and extras bring YAML files. So `hydra.compose` in a
notebook needs both, and not only the project's folder of YAML files.
"""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from lockstep_gpt.config_files import config_folder
from lockstep_gpt.registry import config_folders_of_extras


class OwnConfigs(SearchPathPlugin):
    """Adds what YAML files of the project need; changes nothing for other programs."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Register the settings, and append the folder of each extra."""
        if not any(_is_ours(element.path) for element in search_path.get_path()):
            return
        # Not in programs that only have Hydra in common.
        from lockstep_gpt.launch import compose

        if not compose.has_schema():
            compose.register_schema()
        for name, folder in config_folders_of_extras().items():
            search_path.append(f"extra-{name}", f"file://{folder}")


def _is_ours(path: str) -> bool:
    """Return whether an element of the search path is the project's folder of YAML files."""
    if path == "pkg://lockstep_gpt.configs":
        return True
    return not path.startswith("pkg:") and Path(path.removeprefix("file://")) == config_folder()
