"""How settings are checked, and how those of a dataclass are declared."""

import math
from collections.abc import Mapping
from dataclasses import Field, field, fields
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Literal, TypeVar, cast

from omegaconf import MISSING

from lockstep.errors import UserError

Kind = TypeVar("Kind")
Decides = Literal["tokens", "place", "nothing"]


def setting(
    meaning: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    decides: Decides = "tokens",
    **limits: float,
) -> Any:
    """Declare a setting by its `meaning`; without a `default`, a preset or the user must set it.

    The `limits` of a number are `at_least`, `above`, `at_most`, and `below`.

    What one of a source of tokens `decides`: the tokens, the place whose content decides them, or
    nothing of them.
    """
    rules = {name.replace("_", " "): limit for name, limit in limits.items()}
    metadata = {"meaning": meaning, "choices": choices, "limits": rules, "decides": decides}
    return field(default=default, metadata=metadata)


def not_a_config(kind: type[Kind]) -> type[Kind]:
    """Let `hydra.utils.instantiate` pass instances of a dataclass on as they are.

    OmegaConf takes what is a dataclass for a configuration: `instantiate(cfg.trainer,
    callbacks=[...])` would replace such a callback by a copy of its fields.
    """
    delattr(kind, "__dataclass_fields__")
    return kind


LARGEST = 10**15  # of whole numbers without a limit of their own; no run has as many tokens
_HOLDS = {"at least": ge, "above": gt, "at most": le, "below": lt}


# How a field's annotation says what its value may be -> in words.
_KINDS = {
    "None": "null",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
}


def _is_of(value: Any, kind: str) -> bool:
    """Return whether a value is of a plain kind."""
    if isinstance(value, bool) or kind == "bool":
        return isinstance(value, bool) and kind == "bool"
    kinds = {"None": type(None), "float": int | float, "int": int, "str": str}
    return isinstance(value, kinds[kind])  # type: ignore[arg-type]


class Checked:
    """Checks every field against its own rules when an instance is created."""

    node: ClassVar[str] = ""  # the class's place in the settings tree, as the user writes it

    def __post_init__(self) -> None:
        for item in fields(cast(Any, self)):
            self._check(item, getattr(self, item.name))

    def _check(self, item: Field[Any], value: Any) -> None:
        kinds = str(item.type).split(" | ")
        if {*kinds} <= _KINDS.keys() and not any(_is_of(value, kind) for kind in kinds):
            self.refuse(item.name, f"must be {' or '.join(_KINDS[kind] for kind in kinds)}")
        choices = item.metadata.get("choices")
        if choices and value is not None and value not in choices:
            self.refuse(item.name, f"is not one of {', '.join(choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(item.name, "must be a finite number")
        limits = item.metadata.get("limits", {})
        if isinstance(value, int):
            limits = {"at most": LARGEST, **limits}
        for rule, limit in limits.items():
            if isinstance(value, int | float) and not _HOLDS[rule](value, limit):
                self.refuse(item.name, f"must be {rule} {limit}")

    def refuse(self, name: str, rule: str) -> None:
        """Raise a `UserError` that names the setting and the rule that it breaks."""
        check(f"{self.node}.{name}".lstrip("."), getattr(self, name), False, rule)


def node_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a node of a configuration; an empty one if it is null or a plain value there."""
    node = values.get(name)
    return node if isinstance(node, dict) else {}


def precision_of(values: Mapping[str, Any]) -> str:
    """Return the precision of a run's Trainer, as the settings `precision` or `trainer` say."""
    of_trainer = (values.get("trainer") or {}).get("precision")
    return str(values.get("precision") or of_trainer or "32-true")


def check(setting: str, value: Any, holds: bool, rule: str) -> None:
    """Raise a `UserError` if a setting's value breaks the `rule`, that is, unless it `holds`."""
    if not holds:
        raise UserError(f"{setting}={as_typed(value)} {rule}")


def check_switch(setting: str, value: Any) -> None:
    """Raise a `UserError` if a setting is neither true nor false."""
    check(setting, value, isinstance(value, bool), "must be true or false")


def check_choice(setting: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise a `UserError` if a setting is not one of its choices."""
    check(setting, value, value in choices, f"is not one of {', '.join(map(as_typed, choices))}")


def check_whole(setting: str, value: Any, **limits: float) -> None:
    """Raise a `UserError` if a setting is no whole number within `limits`; see `check_number`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    check(setting, value, is_whole, "must be a whole number")
    check_number(setting, value, **{"at_most": LARGEST, **limits})


def check_number(setting: str, value: Any, **limits: float) -> None:
    """Raise a `UserError` if a setting is no number within `limits`, declared as in `setting`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    check(setting, value, is_number, "must be a number")
    is_finite = not isinstance(value, float) or math.isfinite(value)
    check(setting, value, is_finite, "must be a finite number")
    for name, limit in limits.items():
        rule = name.replace("_", " ")
        check(setting, value, _HOLDS[rule](value, limit), f"must be {rule} {limit}")


def as_typed(value: Any) -> str:
    """Return `value` as you type it on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_column(metric: str) -> str:
    """Return a metric's name as in a table or a summary: `val/loss` is `val_loss`."""
    return metric.replace("/", "_")


def counted(count: int, unit: str, plural: str = "s") -> str:
    """Return a count with its unit: `1 step`, `2,000 steps`."""
    ending = "" if count == 1 else plural
    return f"{count:,} {unit}{ending}"
