"""Composes the configuration with Hydra, once, in the parent; reports a mistake in one line."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from yaml import YAMLError

from lockstep_gpt import config as schema
from lockstep_gpt.config import PROGRAM, Config, UserError
from lockstep_gpt.launch import checks, choices, devices
from lockstep_gpt.registry import additions, resolved

KINDS = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
OLD = hydra.__version__.startswith("1.3.")  # later versions warn about its arguments
register_resolver: Any = getattr(OmegaConf, "register_new_resolver" if OLD else "register_resolver")


def run(arguments: list[str], job: Callable[[DictConfig], Any]) -> None:
    """Call `job` with the composed config, for each job of a sweep, or raise a `UserError`."""
    _register_schema(arguments)
    for understood in map(resolved, additions("WORDS")):
        arguments[:] = understood(arguments)  # in place: a sweep's jobs show only other words
    started = []

    @hydra.main(str(schema.config_folder()), "train", **({"version_base": "1.3"} if OLD else {}))
    def task(config: DictConfig) -> Any:
        started.append(config)
        return job(config)

    with _command_line(arguments):
        try:
            task()
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
            if started:  # the job's own error, not the composition's
                raise
            found = re.match(r"In '(.+?)': .+ raised while composing config", str(error))
            where = f"{found[1]}.yaml: " if found else ""  # the file with the mistake
            raise UserError(where + one_line(error, arguments)) from None


def quoted(arguments: list[str]) -> list[str]:
    """Quote paths with an `=`, which Hydra could not parse, such as `step=000500.ckpt`."""
    return [re.sub(r"^(resume|run_dir)=([^'\"].*=.*)$", r"\1='\2'", word) for word in arguments]


def overrides() -> list[str]:
    """Return the job's own overrides: in a sweep, with one value each."""
    given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(word) for word in cast(list[Any], given)]


def checked(config: DictConfig) -> tuple[dict[str, Any], Config]:
    """Return the values to freeze, and the same as a checked `Config`, or raise a `UserError`."""
    with told_in_one_line(overrides()):
        values = frozen(config)
        checked_config = schema.from_container(values)
    checks.refuse_conflicts(checked_config)
    return values, checked_config


@contextlib.contextmanager
def told_in_one_line(arguments: list[str], first: Callable[[], Any] = list) -> Iterator[None]:
    """Raise a `UserError` for an error of Hydra or OmegaConf; `first` may raise a better one."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        first()
        raise UserError(one_line(error, arguments)) from None


def _register_schema(arguments: list[str]) -> None:
    # Below hydra/, so that --help does not list them as groups to choose from.
    store = ConfigStore.instance()
    # It returns copies anyway; Hydra also copies the store, a hundred times for --help.
    ConfigStore.__deepcopy__ = lambda self, _: self  # type: ignore[attr-defined]
    # Also groups without a valid default: setting one of their settings sets no other.
    register_resolver("precision_here", devices.precision_here, replace=True)
    groups = {**schema.groups(), "data": MISSING}  # each data choice brings its own
    config = schema.with_groups(*groups.items())
    store.repo.get("hydra", {}).pop("schema", None)  # entries of an earlier call would stay
    store.store(group="hydra/schema", name="config", node=config)
    for name, settings in schema.data_choices(*_config_dirs(arguments)).items():
        store.store(group="hydra/schema/data", name=name, node=settings)


def _config_dirs(arguments: list[str]) -> list[Path]:
    """Return the folders that Hydra's --config-dir names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", action="append", type=Path, default=[])
    return list(parser.parse_known_args(arguments)[0].config_dir)


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Pass Hydra the arguments, and make it raise its errors instead of printing them."""
    name = "HYDRA_FULL_ERROR"
    words, told = sys.argv, os.environ.get(name)
    sys.argv, os.environ[name] = [PROGRAM, *quoted(arguments)], "1"
    try:
        yield
    finally:
        sys.argv = words
        del os.environ[name]
        if told is not None:
            os.environ[name] = told


def frozen(config: DictConfig) -> dict[str, Any]:
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
    value = raw if OmegaConf.is_missing(parent, key) else parent[key]
    return raw if reads else _plain(value, reads)


def one_line(error: Exception, arguments: list[str]) -> str:
    """Return value, rule, and remedy of an error of Hydra or OmegaConf."""
    nested = error.__cause__ or error.__context__  # the latter if a YAML file is at fault
    hidden = isinstance(error, HydraException) and isinstance(nested, OmegaConfBaseException)
    cause = nested if hidden else error
    found = re.search(r"Could not override '[+~]*([^']+)'", str(error))
    path = getattr(cause, "full_key", None) or (found and found[1])
    given = dict(word.lstrip("+~").split("=", 1) for word in arguments if "=" in word)
    value = given.get(path, "...") if path else ""
    text = re.sub(r"\s*\n\s*", " ", str(cause)).strip()
    found = re.search(r"Could not (?:find|load) '(.+)/(.+?)'", text)
    if found and found[1] in choices.groups():
        listed = re.search(r"Available options in .+?: (.+?)( Config s.+)?$", text)
        files = (schema.config_folder() / found[1]).glob("*.yaml")
        names = listed[1].split() if listed else sorted(path.stem for path in files)
        if instead := choices.GONE.get((found[1], found[2])):
            return f"{found[1]}={found[2]} is gone; {instead}"
        near = choices.suggestion(found[2], names)
        return f"{found[1]}={found[2]} is not one of {', '.join(names)}{near}"
    if path and re.search("not in|Could not override|Could not append", text):
        return _unknown_setting(path, value)
    if path and (found := re.search(r"Value '(.*?)' .*(converted to|not a valid) (\w+)", text)):
        wrong = found[1] if value == "..." else value
        return f"{path}={wrong} must be {KINDS.get(found[3], found[3])}"
    if path and (found := re.match(r"(Value .+?)( full_key: .+)?$", text)):
        return f"{path}={value}: {found[1].rstrip('.')}"
    if found := re.search(r"Ambiguous value for argument '(.+?)' ", text):
        return f"{found[1]} has several values: add --multirun to run each, or write [a,b]"
    if found := re.search(r"Error parsing override '(.*?)' missing EQUAL", text):
        return f"{found[1]} has no value; write NAME=VALUE, without spaces"
    noise = r" (full_key|reference_type|object_type)[:=] ?\S*| (See https?://|Config search path).+"
    text = re.sub(r"^Error when parsing index: .+?\]\. ", "", re.sub(noise, "", text))
    return f"{path}={value}: {text}" if path else text


def _unknown_setting(path: str, value: str) -> str:
    parent, _, name = path.rpartition(".")
    if parent == "trainer" and (door := schema.OWNED_TRAINER_KEYS.get(name)):
        return schema.owned_key_line(name, value, door)
    if instead := choices.GONE_SETTINGS.get(path):
        return f"{path} is gone; {instead}"
    settings = choices.settings_below(parent)
    if owners := sorted(choice for choice, names in settings.items() if name in names):
        return f"{path} is a setting of {parent}={' or '.join(owners)}, which is not chosen here"
    if near := choices.suggested_setting(path):
        return f"unknown setting {path}{near}"
    if parent.split(".")[0] in schema.OPEN_GROUPS:
        return f"unknown setting {path}; to add one that the YAML lacks, write +{path}={value}"
    known = ", ".join(dict.fromkeys(each for names in settings.values() for each in names))
    return f"unknown setting {path}; there are {known}"
