"""What extras add to the core: six kinds of hooks, each with the type of its functions.

An extra is a package in `extras/`. Its `__init__` declares a hook by assigning to the kind's name:
`CHECK = ".extras.NAME.module:refuse_impossible"`. Targets are `module:name` and imported on use,
so a command doesn't pay for an extra that it doesn't need. The core never names an extra here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TextIO, TypeVar

from lockstep_gpt import extras

if TYPE_CHECKING:
    from lightning import Callback

    from lockstep_gpt.config import Config
    from lockstep_gpt.tokens.tokenizer import Tokenizer
    from lockstep_gpt.model.language_model import LanguageModel
    from lockstep_gpt.run.directory import RunDirectory
    from lockstep_gpt.settings import ExtraSettings

T = TypeVar("T")


class Kind(NamedTuple, Generic[T]):
    """A kind of hook: the name that extras assign to, and the type of what they assign."""

    name: str


class Command(NamedTuple):
    """A function `(arguments) -> exit status` as `module:name`, and its purpose."""

    target: str
    meaning: str
    overrides: bool  # accepts Hydra overrides, which a shell can complete


class RewriteArguments(Protocol):
    """Understands short forms on a command line."""

    def __call__(self, words: list[str], /) -> list[str]:
        """Return the command's arguments as Hydra accepts them, or raise a `UserError`."""


class CheckConfig(Protocol):
    """Refuses what can't work, before anything is created and before torch is imported."""

    def __call__(self, config: Config, /) -> None:
        """Raise a `UserError` for settings that exclude each other, or files that are missing."""


class MakeCallbacks(Protocol):
    """Makes Lightning callbacks; see `run/callbacks/step.py` for what else they may offer."""

    def __call__(
        self, config: Config, directory: RunDirectory, rank: int, terminal: TextIO, /
    ) -> Sequence[Callback]:
        """Return this rank's callbacks for a run; none if its settings ask for none."""


class TransformModel(Protocol):
    """Changes a new model, in training and wherever a checkpoint's model is loaded."""

    def __call__(self, model: LanguageModel, config: Config, tokenizer: Tokenizer, /) -> None:
        """Change the model in place as the settings say, or raise a `UserError`."""


COMMANDS = Kind[dict[str, Command]]("COMMANDS")  # name -> command
SETTINGS = Kind[dict[str, str]]("SETTINGS")  # group -> its class, as `module:name`
ARGUMENTS = Kind[RewriteArguments]("ARGUMENTS")
CHECK = Kind[CheckConfig]("CHECK")
CALLBACKS = Kind[MakeCallbacks]("CALLBACKS")
MODEL = Kind[TransformModel]("MODEL")


def installed() -> list[str]:
    """Return the names of the extras in this project."""
    return _packages(*extras.__path__)


@functools.cache  # a command needs the names hundreds of times
def _packages(*folders: str) -> list[str]:
    return sorted(module.name for module in iter_modules(folders))


def additions(kind: Kind[T]) -> list[T]:
    """Return what the extras add of one kind; targets are imported."""
    values: list[Any] = []
    for name in installed():
        package = importlib.import_module(f"{extras.__name__}.{name}")
        if not hasattr(package, kind.name):
            continue
        value = getattr(package, kind.name)
        if isinstance(value, str):
            value = resolved(value)
        values.append(value)
    return values


def settings_classes() -> dict[str, type[ExtraSettings]]:
    """Return the settings class of each group that an extra adds."""
    return {
        group: resolved(target) for table in additions(SETTINGS) for group, target in table.items()
    }


def config_folders_of_extras() -> dict[str, Path]:
    """Return the folder of YAML files of each extra that has one, by the extra's name."""
    folders = {
        name: Path(path) / name / "configs" for path in extras.__path__ for name in installed()
    }
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def optional_part(extra: str, module: str) -> Any:
    """Import and return a module of an extra; None if the extra is not installed."""
    if extra not in installed():
        return None
    return importlib.import_module(f"{extras.__name__}.{extra}.{module}")


def resolved(target: str) -> Any:
    """Import and return `module:name`, or `module` alone; `.module` is in this package."""
    if target.startswith("."):
        target = f"{__package__}{target}"
    return resolve_name(target)
