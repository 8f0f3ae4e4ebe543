"""The settings of `data=mixture`, and their short forms on a command line."""

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt.config import (
    DataConfig,
    UserError,
    as_typed,
    check,
    data_sources,
    setting,
)

NAME = r"[A-Za-z0-9_-]+"
MOST = 255  # sources, so that a byte names one
# Settings of a source that only the mixture has, and the value that leaves them to it.
MIXTURES = {
    "root": "data",
    "val_tokens": None,
    "fingerprint": None,
    "num_workers": 0,
    "packing": "stream",
}


def about(meaning: str) -> dict[str, Any]:
    """Return what `setting` keeps of one; `past.py` decides what a resume keeps of these."""
    return {"meaning": meaning, "choices": (), "limits": {}, "on_resume": "free"}


@dataclass
class MixtureData(DataConfig):
    """Several sources at once, each with a share of the tokens or a number of epochs."""

    source: str = setting("where the text comes from", "mixture", choices=("mixture",))
    sources: dict[str, Any] = field(
        default_factory=dict, metadata=about("name you choose: another `data` preset and settings")
    )
    weights: dict[str, float] = field(
        default_factory=dict, metadata=about("by name: share of the tokens, relative to others")
    )
    epochs: dict[str, float] = field(
        default_factory=dict, metadata=about("by name: epochs in the run, instead of a weight")
    )
    schedule: list[Any] = field(
        default_factory=list,
        metadata=about(
            "new weights after a fraction of the run: `[{from: 0.8, weights: {code: 1}}]`"
        ),
    )
    planned_tokens: int | None = setting(
        "tokens of the planned run, for epochs and schedule; null: this run's",
        None,
        on_resume="free",
        at_least=1,
    )
    tokenizer_from: str | None = setting(
        "source whose tokenizer all sources use; null: all must have equal tokenizers", None
    )

    def __post_init__(self) -> None:
        """Also check every source, and that it has one weight, at any time, or epochs."""
        super().__post_init__()
        if self.val_fraction != DataConfig.__dataclass_fields__["val_fraction"].default:
            rule = "has no effect in a mixture; set data.sources.NAME.val_fraction"
            self.refuse("val_fraction", rule)
        if not self.sources:
            raise UserError(
                "data=mixture has no sources; add some, such as data.sources.code=stdlib "
                "data.weights.code=1"
            )
        if len(self.sources) > MOST:
            raise UserError(f"data.sources has {len(self.sources)}; the most are {MOST}")
        self.each()
        self._check_table("weights", self.weights)
        self._check_table("epochs", self.epochs)
        self._check_schedule()
        if self.tokenizer_from is not None:
            self._check_name("tokenizer_from", self.tokenizer_from)
        scheduled = [phase["weights"] for phase in self.schedule]
        weighted = {name for part in (self.weights, *scheduled) for name in part}
        for name in self.names_of_sources():
            if name in self.epochs and name in weighted:
                self._refuse(f"epochs.{name}", self.epochs[name], "and a weight are both set")
            if name not in self.epochs and name not in weighted:
                raise UserError(
                    f"data.sources.{name} has no share; set data.weights.{name} or "
                    f"data.epochs.{name}"
                )
        if not self.weights and scheduled:
            raise UserError(
                "data.schedule changes weights, and data.weights has none to begin with"
            )

    def names_of_sources(self) -> list[str]:
        """Return the names in the order in which everything numbers them."""
        return sorted(self.sources)

    def each(self) -> dict[str, DataConfig]:
        """Return each source's settings, checked, by name; raise a `UserError` about one."""
        return {name: self._source(name) for name in sorted(self.sources, key=str)}

    def _source(self, name: Any) -> DataConfig:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            rule = "is not a name for a source; use letters, digits, hyphens, and underscores"
            raise UserError(f"data.sources: {name!r} {rule}")
        values, place = self.sources[name], f"data.sources.{name}"
        kinds = {kind: own for kind, own in data_sources().items() if kind != self.source}
        kind = values.get("source") if isinstance(values, dict) else None
        if kind not in kinds:
            rule = f"names no source: choose one of {', '.join(kinds)}, as in {place}=text"
            raise UserError(f"{place} {rule}")
        try:
            with renamed(name):
                merged = OmegaConf.merge(OmegaConf.structured(kinds[kind]), values)
                found: Any = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            line = str(error).splitlines()[0]
            raise UserError(f"{place}.{error.full_key}: {line}") from None
        for own, left in MIXTURES.items():
            if getattr(found, own, left) != left:
                value = as_typed(getattr(found, own))
                where = "" if own == "num_workers" else f"; set data.{own}"
                raise UserError(f"{place}.{own}={value} has no effect in a mixture{where}")
        found.root = self.root
        return cast(DataConfig, found)

    def _check_table(self, where: str, values: dict[Any, Any]) -> None:
        for name, value in values.items():
            self._check_name(where, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                rule = "must be a number above 0; to not use a source, remove its name"
                self._refuse(f"{where}.{name}", value, rule)

    def _check_name(self, where: str, name: Any) -> None:
        known = ", ".join(self.names_of_sources())
        if name not in self.sources:
            raise UserError(f"data.{where}: there is no source {name}; there are {known}")

    def _check_schedule(self) -> None:
        before = 0.0
        for number, phase in enumerate(self.schedule):
            where = f"schedule[{number}]"
            if not isinstance(phase, dict) or set(phase) != {"from", "weights"}:
                rule = "must be of the form {from: 0.8, weights: {NAME: 1}}"
                self._refuse(where, phase, rule)
            start, weights = phase["from"], phase["weights"]
            if not isinstance(start, int | float) or not before < start < 1:
                rule = f"must be a fraction of the run, above {before:g} and below 1"
                self._refuse(f"{where}.from", start, rule)
            if not isinstance(weights, dict) or not weights:
                self._refuse(f"{where}.weights", weights, "must have a weight for a source")
            self._check_table(f"{where}.weights", weights)
            before = start

    def _refuse(self, where: str, value: Any, rule: str) -> None:
        check(f"data.{where}", value, False, rule)


class renamed:  # noqa: N801 (a context manager)
    """Raise a source's `UserError` with the names that its settings have in the mixture."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Rename `data.SETTING` to `data.sources.NAME.SETTING`."""
        if isinstance(error, UserError):
            own = {item.name for each in data_sources().values() for item in fields(each)}
            own -= {"root"}
            known = "|".join(sorted(own, key=len, reverse=True))
            text = re.sub(rf"\bdata\.({known})\b", rf"data.sources.{self.name}.\1", str(error))
            raise UserError(text) from error


def with_sources(words: list[str]) -> list[str]:
    """Return a command's arguments with the short forms of a mixture's settings as Hydra's own.

    `data.sources.code=stdlib` takes the choice `stdlib` of the group `data` there; weights and
    epochs of new names need no plus.
    """
    made, chosen = [], dict[str, str]()
    for word in words:
        if found := re.fullmatch(rf"data\.sources\.({NAME})=([^{{'\"\[].*)", word):
            name, choice = found.groups()
            if name in chosen:
                raise UserError(
                    f"{word}: data.sources.{name} is {chosen[name]} already; give each source a "
                    "name of its own"
                )
            chosen[name], word = choice, f"+data@data.sources.{name}={choice}"
        made.append(re.sub(r"^(data\.(weights|epochs)[.=])", r"++\1", word))
    return made


def right_name(word: str) -> str:
    """Say how to choose a source that is not chosen, or where the weight of one belongs."""
    if re.fullmatch(rf"data\.sources\.{NAME}", word):
        return f"; choose what it is first, as in {word}=text"
    found = re.fullmatch(rf"data\.sources\.({NAME})\.(weight|epoch)s?", word)
    return f"; use data.{found[2]}s.{found[1]}" if found else ""
