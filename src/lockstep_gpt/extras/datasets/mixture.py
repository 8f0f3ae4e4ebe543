"""`data=mixture`: several sources at once, and the short forms of its settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.mixed_order import MixedOrder
from lockstep_gpt.extras.datasets.mixing import PreparedSources
from lockstep_gpt.extras.datasets.renamed import renamed
from lockstep_gpt.extras.datasets.shares import phases
from lockstep_gpt.settings import as_typed, check, setting
from lockstep_gpt.tokens.data_settings import (
    DataConfig,
    DataModuleConfig,
    data_choices,
    data_class,
)
from lockstep_gpt.tokens.recipe import Recipe
from lockstep_gpt.tokens.sources.source import Position, Source, TokenBlock
from lockstep_gpt.tokens.tokenizer import Tokenizer

NAME = r"[A-Za-z0-9_-]+"
MOST = 255  # sources
EACH = ("val_fraction", "test_fraction", "shard_mb")  # settings that each source has
# Settings of a source that only the mixture has, and the value that leaves them to it.
MIXTURES = {"root": "data", "val_tokens": None, "fingerprint": None}


def about(meaning: str) -> dict[str, Any]:
    """Return what `setting` keeps of one; `past.py` decides what a resume keeps of these."""
    return {"meaning": meaning, "choices": (), "limits": {}, "on_resume": "free"}


@dataclass
class Mixture(Source):
    """Several sources at once, each with a share of the tokens or a number of epochs."""

    kind: ClassVar[str] = "mixture"
    added_later: ClassVar[frozenset[str]] = Source.added_later | {"shard_mb"}

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
    tokenizer: str | None = setting(
        "of all sources whose settings don't name one; null: the sources' own", None
    )
    tokenizer_from: str | None = setting(
        "source whose tokenizer all sources use; null: all must have equal tokenizers", None
    )

    def __post_init__(self) -> None:
        """Also check every source, and that it has one weight, at any time, or epochs."""
        super().__post_init__()
        for item in fields(DataConfig) + fields(Source):
            if item.name in EACH and getattr(self, item.name) != item.default:
                rule = f"has no effect in a mixture; set data.sources.NAME.{item.name}"
                self.refuse(item.name, rule)
        if not self.sources:
            raise UserError(
                "data=mixture has no sources; add some, such as data.sources.code=stdlib "
                "data.weights.code=1"
            )
        if len(self.sources) > MOST:
            raise UserError(f"data.sources has {len(self.sources)}; at most {MOST} are allowed")
        self.make_sources()
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

    def make_sources(self) -> dict[str, Source]:
        """Return each source with its settings, checked, by name; raise a `UserError` about one."""
        return {name: self._source(name) for name in sorted(self.sources, key=str)}

    @property
    def size(self) -> int | None:
        """None: the sources are read one by one."""
        return None

    @property
    def has_test(self) -> bool:
        """Whether there is a split for tests."""
        return any("test" in index.splits for index in self.prepared.indexes.values())

    @cached_property
    def prepared(self) -> PreparedSources:
        """The sources, prepared; raises a `UserError` if one can't be, or they don't fit."""
        return PreparedSources(self.make_sources(), self.tokenizer_from)

    def identity(self) -> Any:
        """Return each source's name and fingerprint."""
        return [[name, index.fingerprint] for name, index in self.prepared.indexes.items()]

    def tokenizer_identity(self) -> Any:
        """Return None: the tokenizer is a part of each source's fingerprint."""
        return None

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of all sources."""
        return self.prepared.make_tokenizer()

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield nothing: the sources are token files already."""
        yield from ()

    def build(self, recipe: Recipe, folder: Path) -> None:
        """Link the token files of all sources into a folder, and write their index."""
        self.prepared.link(recipe, folder)

    def order(
        self, sizes: Mapping[str, int], samples: int, block_size: int, seed: int
    ) -> MixedOrder:
        """Return which window each position of a run takes.

        Args:
            sizes: training windows of each source.
            samples: training windows of the whole run.
            block_size: tokens of a window.
            seed: of the run.
        """
        planned = samples
        if self.planned_tokens is not None:
            planned = max(1, self.planned_tokens // block_size)
        key = (tuple(sizes.items()), planned, seed)
        if key not in self._orders:
            shares = phases(self.weights, self.epochs, self.schedule, sizes, planned)
            self._orders[key] = MixedOrder(sizes, shares, seed)
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[Any, MixedOrder]:
        return {}

    def _source(self, name: Any) -> Source:
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            rule = "is not a name for a source; use letters, digits, hyphens, and underscores"
            raise UserError(f"data.sources: {name!r} {rule}")
        values = self.sources[name]
        place = f"data.sources.{name}"
        target = values.get("_target_") if isinstance(values, dict) else None
        source_class = data_class(target) if target else DataModuleConfig
        if not issubclass(source_class, Source) or issubclass(source_class, Mixture):
            kinds = ", ".join(kind for kind in data_choices() if kind != self.kind)
            raise UserError(f"{place} names no source: choose one of {kinds}, as in {place}=text")
        try:
            with renamed(name, source_class):
                merged = OmegaConf.merge(OmegaConf.structured(source_class), values)
                source: Any = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            line = str(error).splitlines()[0]
            raise UserError(f"{place}.{error.full_key}: {line}") from None
        for door, default in MIXTURES.items():
            value = getattr(source, door)
            if value != default:
                raise UserError(
                    f"{place}.{door}={as_typed(value)} has no effect in a mixture; set data.{door}"
                )
        assert isinstance(source, Source)
        with renamed(name, source_class):
            return replace(source, root=self.root, **self._tokenizer_of(source))

    def _tokenizer_of(self, source: Any) -> dict[str, Any]:
        """Return the tokenizer of a source that names none, as its setting."""
        defaults = {item.name: item.default for item in fields(source)}
        is_open = "tokenizer" in defaults and source.tokenizer == defaults["tokenizer"]
        if is_open and self.tokenizer:
            return {"tokenizer": self.tokenizer}
        return {}

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
            start = phase["from"]
            weights = phase["weights"]
            if not isinstance(start, int | float) or not before < start < 1:
                rule = f"must be a fraction of the run, above {before:g} and below 1"
                self._refuse(f"{where}.from", start, rule)
            if not isinstance(weights, dict) or not weights:
                self._refuse(f"{where}.weights", weights, "must have a weight for a source")
            self._check_table(f"{where}.weights", weights)
            before = start

    def _refuse(self, where: str, value: Any, rule: str) -> None:
        check(f"data.{where}", value, False, rule)


def with_sources(words: list[str]) -> list[str]:
    """Return a command's arguments with the short forms of a mixture's settings as Hydra's own.

    `data.sources.code=stdlib` takes the choice `stdlib` of the group `data` there; weights and
    epochs of new names need no plus.
    """
    arguments = []
    chosen: dict[str, str] = {}
    for word in words:
        match = re.fullmatch(rf"data\.sources\.({NAME})=([^{{'\"\[].*)", word)
        if match:
            name, choice = match.groups()
            if name in chosen:
                raise UserError(
                    f"{word}: data.sources.{name} is {chosen[name]} already; give each source a "
                    "name of its own"
                )
            chosen[name] = choice
            word = f"+data@data.sources.{name}={choice}"
        arguments.append(re.sub(r"^(data\.(weights|epochs)[.=])", r"++\1", word))
    return arguments
