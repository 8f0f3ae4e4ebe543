"""Composes the configuration with Hydra, once, in the parent; reports a mistake in one line."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from lockstep_gpt import PROGRAM
from lockstep_gpt.config import Config, from_container, groups, with_groups
from lockstep_gpt.config_files import config_folder, refuse_same_names
from lockstep_gpt.tokens.data_settings import data_choices
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import checks
from lockstep_gpt.launch.arguments import translate_arguments
from lockstep_gpt.launch.hydra_errors import as_user_error, one_line
from lockstep_gpt.launch.quoting import quote_texts
from lockstep_gpt.registry import ARGUMENTS, additions

# Later versions warn about the arguments and names of 1.3.
if hydra.__version__.startswith("1.3."):
    HYDRA_ARGUMENTS = {"version_base": "1.3"}
    register_resolver: Any = OmegaConf.register_new_resolver
else:
    HYDRA_ARGUMENTS = {}
    register_resolver = OmegaConf.register_resolver

# What composing may raise.
COMPOSING = (HydraException, OmegaConfBaseException, YAMLError, ValueError, RecursionError)


def run(arguments: list[str], job: Callable[[DictConfig], Any]) -> None:
    """Call `job` with the composed config, for each job of a sweep.

    Args:
        arguments: the words of the command line; shortcuts among them are replaced in place.
        job: its result is the job's metric, which a sweeper may optimize.

    Raises:
        UserError: a word or a YAML file is wrong. Errors of the job are raised as they are.
    """
    folders = _config_dirs(arguments)
    refuse_same_names(folders)
    register_schema(*folders)
    for rewrite in (translate_arguments, *additions(ARGUMENTS)):
        arguments[:] = rewrite(arguments)  # in place: a sweep's jobs show only other words
    has_started = False

    @hydra.main(str(config_folder()), "train", **HYDRA_ARGUMENTS)
    def task(config: DictConfig) -> Any:
        nonlocal has_started
        has_started = True
        return job(config)

    with _command_line(arguments):
        try:
            task()
        except COMPOSING as error:
            if has_started:  # the job's own error, not the composition's
                raise
            raise UserError(one_line(error, arguments)) from None


def overrides() -> list[str]:
    """Return the job's own overrides: in a sweep, with one value each."""
    words = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word) for word in cast(list[Any], words)]


def resolve_config(composed: DictConfig) -> tuple[dict[str, Any], Config]:
    """Return the values to freeze, and the same as a checked `Config`, or raise a `UserError`."""
    with as_user_error(overrides()):
        values = values_to_freeze(composed)
        config = from_container(values)
    checks.refuse_conflicts(config)
    checks.refuse_settings_of_gpt(config, overrides())
    return values, config


def has_schema() -> bool:
    """Return whether `register_schema` has been called."""
    return "schema" in ConfigStore.instance().repo.get("hydra", {})


def register_schema(*folders: Path) -> None:
    """Register the settings that YAML files and overrides may set.

    Args:
        folders: those of YAML files besides the project's own.
    """
    # Below hydra/, so that --help does not list them as groups to choose from.
    store = ConfigStore.instance()
    # It returns copies anyway; Hydra also copies the store, a hundred times for --help.
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
    # Also groups without a valid default: setting one of their settings sets no other.
    classes = {**groups(), "data": MISSING}  # each data choice brings its own
    config = with_groups(*classes.items())
    store.repo.get("hydra", {}).pop("schema", None)  # entries of an earlier call would stay
    store.store(group="hydra/schema", name="config", node=config)
    for name, settings in data_choices(*folders).items():
        store.store(group="hydra/schema/data", name=name, node=settings)


def _config_dirs(arguments: list[str]) -> list[Path]:
    """Return the folders that Hydra's --config-dir names."""
    flags = ("--config-dir", "-cd")
    folders = [Path(word) for flag, word in pairwise(arguments) if flag in flags]
    of_one_word = [word.partition("=") for word in arguments]
    return [
        *folders,
        *(Path(folder) for flag, _, folder in of_one_word if folder and flag in flags),
    ]


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Pass Hydra the arguments, and make it raise its errors instead of printing them."""
    name = "HYDRA_FULL_ERROR"
    words_before = sys.argv
    value_before = os.environ.get(name)
    hydra_before = GlobalHydra.instance().hydra  # a notebook may have called `hydra.initialize`
    GlobalHydra.instance().clear()
    sys.argv = [PROGRAM, *quote_texts(arguments)]
    os.environ[name] = "1"
    try:
        yield
    finally:
        sys.argv = words_before
        GlobalHydra.instance().hydra = hydra_before
        del os.environ[name]
        if value_before is not None:
            os.environ[name] = value_before


def values_to_freeze(config: DictConfig) -> dict[str, Any]:
    """Return plain values with every reference resolved, except those that read the environment.

    The environment may contain secrets, which don't belong in any file of a run.
    """
    reads: list[str] = []

    def read(name: str, *default: Any) -> Any:
        reads.append(name)
        return oc.env(name, *default)

    register_resolver("oc.env", read, replace=True)
    try:
        return cast(dict[str, Any], _plain(config, reads))
    finally:
        register_resolver("oc.env", oc.env, replace=True)


def _plain(node: Any, reads: list[str]) -> Any:
    if not isinstance(node, DictConfig | ListConfig):
        return node
    raw: Any = OmegaConf.to_container(node, resolve=False)
    if isinstance(node, ListConfig):
        return [_plain_child(node, index, raw[index], reads) for index in range(len(node))]
    return {key: _plain_child(node, key, raw[key], reads) for key in node}


def _plain_child(parent: Any, key: Any, raw: Any, reads: list[str]) -> Any:
    reads.clear()
    if OmegaConf.is_missing(parent, key):
        return raw
    value = parent[key]  # resolves its references; those to the environment are noted in `reads`
    if reads:
        return raw
    return _plain(value, reads)
