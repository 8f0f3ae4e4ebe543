"""Quicker composition of settings, with the same results, for commands in one process.

Most of a command's time without training is Hydra's. Commands of tests mostly compose the same
files with the same choices, so all that Hydra does before it sets the command line's values is
remembered. New Python processes still compose everything anew.
"""

import contextlib
import copy
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from lockstep.launch import composed as composing
from lockstep.launch.main import training

MOST = 100  # remembered results; more would take time in each garbage collection


@pytest.fixture(scope="session", autouse=True)
def quick_composition() -> Iterator[None]:
    """Compose quickly in this process, unless it is a fork of one that does."""
    with contextlib.nullcontext() if "composition" in sys.modules else quick():
        yield


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Save most of the time of composing in this process and its forks.

    Each command reads YAML in Python, and has Hydra compose everything one extra time, only for
    `hydra.mode`.
    """
    with _remembered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        patch.setattr(Hydra, "get_mode", lambda *_, **__: None)  # as if it is not set
        yield


@contextlib.contextmanager
def _remembered() -> Iterator[None]:
    """Make Hydra remember which files choices lead to, and what these files compose."""
    choose = defaults_list._create_defaults_list
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    memory: dict[str, Any] = {}

    def make_room() -> None:
        if len(memory) >= MOST:
            memory.clear()

    def chosen(repo: Any, config_name: Any, overrides: Any, *flags: Any, **named: Any) -> Any:
        values, overrides.config_overrides = overrides.config_overrides, []  # set later
        try:
            key = repr((config_name, overrides, flags, named, _files(repo)))
            if key not in memory:
                make_room()
                made = choose(repo, config_name, overrides, *flags, **named)
                memory[key] = made, copy.deepcopy(vars(overrides))
            made, after = memory[key]
            vars(overrides).update(copy.deepcopy(after))
        finally:
            overrides.config_overrides = values
        return made

    def merged(self: Any, defaults: Any, repo: Any) -> Any:
        key = repr((defaults, _files(repo)))
        if key not in memory:
            make_room()
            memory[key] = merge(self, defaults, repo)
        return copy.deepcopy(memory[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults_list, "_create_defaults_list", chosen)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merged)
        yield


def _files(repo: Any) -> list[tuple[Any, ...]]:
    """Return all sources of settings, and what changes if one of their files does."""
    sources: list[tuple[Any, ...]] = []
    for source in repo.get_sources():
        sources.append((source.provider, source.scheme(), source.path))
        for folder, _, names in os.walk(source.path):  # of other schemes, there is no such folder
            stats = [os.stat(f"{folder}/{name}") for name in names]  # noqa: PTH116 (pathlib is slower)
            sources += [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
            sources += [(folder, *names)]
    return sources


@pytest.fixture(scope="session")
def composed() -> Callable[..., DictConfig]:
    """Return the configuration that command-line arguments produce."""

    def compose_words(*words: str) -> DictConfig:
        made: list[DictConfig] = []
        composing.call(training().source, composing.for_hydra([*words]), made.append)
        return made[0]

    return compose_words
