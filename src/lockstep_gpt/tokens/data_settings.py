"""Settings that all data share, and the class of each choice of `data`."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import lockstep_gpt
from lockstep_gpt.catalog import extra_of_target, how_to_add
from lockstep_gpt.config_files import TARGET, yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import Checked, setting


@dataclass
class DataConfig(Checked):
    """`_target_` names the class that has the other settings."""

    node: ClassVar[str] = "data"
    kind: ClassVar[str] = "own"  # of data: begins the names of prepared folders
    on_resume: ClassVar[str] = "kept"  # what decides tokens; the machine decides where they are
    _target_: str = setting("class of the source, or of a LightningDataModule", "")
    root: str = setting("folder for prepared token files", "data", on_resume="machine")
    fingerprint: str | None = setting(
        "hash that the prepared tokens must have; null: that of the current corpus", None
    )
    val_fraction: float = setting("fraction held out for validation", 0.02, above=0, below=1)
    val_tokens: int | None = setting(
        "at most this many validation tokens; null: all", None, on_resume="free", at_least=1
    )
    test_fraction: float = setting("fraction held out for tests", 0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        """Also check that something is left to train on."""
        super().__post_init__()
        if "://" in self.root:
            self.refuse(
                "root",
                "is a URL, and ranks map prepared tokens from a disk; set a folder, and copy what "
                "is at the URL into it",
            )
        if self.val_fraction + self.test_fraction >= 1:
            self.refuse("test_fraction", f"and data.source.val_fraction={self.val_fraction} leave nothing")
        if not self._target_:  # made in code
            self._target_ = f"{type(self).__module__}.{type(self).__name__}"


@dataclass
class DataModuleConfig(DataConfig):
    """A LightningDataModule of your own, which makes the batches; its arguments are free."""

    arguments: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "what it is called with"}
    )

    @classmethod
    def values_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return frozen `values` of `data` with the arguments apart.

        Names of our sources' settings, such as `root`, are arguments here like any other.
        """
        known = {"_target_", "fingerprint", "arguments"}
        others = {name: value for name, value in values.items() if name not in known}
        ours = {name: value for name, value in values.items() if name in known}
        return {**ours, "arguments": {**ours.get("arguments", {}), **others}}

    def as_values(self) -> dict[str, Any]:
        """Return plain values, as in a frozen file."""
        return {"_target_": self._target_, "fingerprint": self.fingerprint, **self.arguments}


def data_class(target: Any) -> type[DataConfig]:
    """Return the settings class of `data._target_`, or raise a `UserError` if there is no such.

    Only classes of this package are imported: the name may be from a file of someone else.
    """
    if not isinstance(target, str):
        example = f"{lockstep_gpt.__name__}.module.Class"
        raise UserError(f"data._target_={target} must be a class, as {example}")
    if not target.startswith(f"{lockstep_gpt.__name__}."):
        return DataModuleConfig
    extra = extra_of_target(target)
    if extra:
        raise UserError(f"data._target_={target} needs {how_to_add(extra)}")
    try:
        named = resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"data._target_={target} cannot be imported ({error}); name a class as "
            f"{lockstep_gpt.__name__}.module.Class"
        ) from error
    if isinstance(named, type) and issubclass(named, DataConfig):
        return named
    return DataModuleConfig


def data_choices(*more: Path) -> dict[str, type[DataConfig]]:
    """Return the settings class of each YAML file that takes its settings from one.

    Args:
        more: other folders of configurations.
    """
    classes = {}
    for choice, path in yaml_files("data", *more).items():
        text = path.read_text(encoding="utf-8")
        target = re.search(TARGET, text, re.MULTILINE)
        if target and f"/hydra/schema/data/{choice}@" in text:
            classes[choice] = data_class(target[1])
    return classes


@dataclass
class PackingConfig(Checked):
    """How tokens fill windows, the samples; `_target_` names the class."""

    node: ClassVar[str] = "packing"
    on_resume: ClassVar[str] = "kept"
    _target_: str = setting("class that makes the windows; empty: a stream", "")
