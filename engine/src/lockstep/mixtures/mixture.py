"""`data=mixture`: several sources at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lockstep.errors import UserError
from lockstep.mixtures.mixed_order import MixedOrder, phases
from lockstep.mixtures.mixing import PreparedSources
from lockstep.settings import as_typed, check, setting
from lockstep.tokens.recipe import Recipe
from lockstep.tokens.sources.source import Position, Source, TokenBlock
from lockstep.tokens.tokenizer import Tokenizer

NAME = r"[A-Za-z0-9_-]+"
MOST = 255  # sources
EACH = ("val_fraction", "test_fraction", "shard_mb")  # settings that each source has
# Settings of a source that only the mixture has, and the value that leaves them to it.
MIXTURES = {"root": "data", "fingerprint": None}


def table(meaning: str, decides: str = "nothing") -> dict[str, Any]:
    """Return what `setting` keeps of one; `mixed_order.py` decides what a resume keeps of these."""
    return {"meaning": meaning, "choices": (), "limits": {}, "decides": decides}


@dataclass
class Mixture(Source):
    """Several sources at once, each with a share of the tokens or a number of epochs."""

    kind: ClassVar[str] = "mixture"
    added_later: ClassVar[frozenset[str]] = Source.added_later | {"shard_mb"}

    sources: dict[str, Source] = field(
        default_factory=dict, metadata=table("name you choose: a source", "place")
    )
    weights: dict[str, float] = field(
        default_factory=dict, metadata=table("by name: share of the tokens, relative to others")
    )
    epochs: dict[str, float] = field(
        default_factory=dict, metadata=table("by name: epochs in the run, instead of a weight")
    )
    schedule: list[Any] = field(
        default_factory=list,
        metadata=table(
            "new weights after a fraction of the run: `[{from: 0.8, weights: {code: 1}}]`"
        ),
    )
    planned_tokens: int | None = setting(
        "tokens of the planned run, for epochs and schedule; null: this run's",
        None,
        decides="nothing",
        at_least=1,
    )
    tokenizer_from: str | None = setting(
        "source whose tokenizer all sources use; null: all must have equal tokenizers", None
    )

    def __post_init__(self) -> None:
        """Also check every source, and that it has one weight, at any time, or epochs."""
        super().__post_init__()
        for item in fields(Source):
            if item.name in EACH and getattr(self, item.name) != item.default:
                rule = f"has no effect in a mixture; set data.source.sources.NAME.{item.name}"
                self.refuse(item.name, rule)
        if not self.sources:
            raise UserError(
                "data=mixture has no sources; add some, such as "
                "+source@data.source.sources.code=stdlib +data.source.weights.code=1"
            )
        if len(self.sources) > MOST:
            count = len(self.sources)
            raise UserError(f"data.source.sources has {count}; at most {MOST} are allowed")
        for name, source in self.sources.items():
            _check_source(name, source)
        if self.tokenizer_from is not None:
            self._check_name("tokenizer_from", self.tokenizer_from)
        self._check_shares()

    def _check_shares(self) -> None:
        self._check_table("weights", self.weights)
        self._check_table("epochs", self.epochs)
        self._check_schedule()
        scheduled = [phase["weights"] for phase in self.schedule]
        weighted = {name for part in (self.weights, *scheduled) for name in part}
        for name in self.names_of_sources():
            if name in self.epochs and name in weighted:
                _refuse(
                    f"epochs.{name}",
                    self.epochs[name],
                    "and a weight are both set; leave one of them out",
                )
            if name not in self.epochs and name not in weighted:
                raise UserError(
                    f"data.source.sources.{name} has no share; set +data.source.weights.{name} or "
                    f"+data.source.epochs.{name}"
                )
        if not self.weights and scheduled:
            raise UserError(
                "data.source.schedule changes weights, and data.source.weights has none to begin "
                "with; set +data.source.weights.NAME"
            )

    def names_of_sources(self) -> list[str]:
        """Return the names in the order in which everything numbers them."""
        return sorted(self.sources)

    def make_sources(self) -> dict[str, Source]:
        """Return each source, with the folder of the mixture, by name."""
        return {
            name: replace(self.sources[name], root=self.root) for name in self.names_of_sources()
        }

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
        key = (tuple(sizes.items()), planned, block_size, seed)
        if key not in self._orders:
            shares = phases(self.weights, self.epochs, self.schedule, sizes, planned)
            self._orders[key] = MixedOrder(sizes, shares, seed, planned * block_size)
        return self._orders[key]

    @cached_property
    def _orders(self) -> dict[Any, MixedOrder]:
        return {}

    def _check_table(self, where: str, values: dict[Any, Any]) -> None:
        for name, value in values.items():
            self._check_name(where, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                rule = "must be a number above 0; to not use a source, remove its name"
                _refuse(f"{where}.{name}", value, rule)

    def _check_name(self, where: str, name: Any) -> None:
        known = ", ".join(self.names_of_sources())
        if name not in self.sources:
            raise UserError(f"data.source.{where}: there is no source {name}; there are {known}")

    def _check_schedule(self) -> None:
        before = 0.0
        for number, phase in enumerate(self.schedule):
            where = f"schedule[{number}]"
            if not isinstance(phase, dict) or set(phase) != {"from", "weights"}:
                rule = "must be of the form {from: 0.8, weights: {NAME: 1}}"
                _refuse(where, phase, rule)
            start = phase["from"]
            weights = phase["weights"]
            if not isinstance(start, int | float) or not before < start < 1:
                rule = f"must be a fraction of the run, above {before:g} and below 1"
                _refuse(f"{where}.from", start, rule)
            if not isinstance(weights, dict) or not weights:
                _refuse(f"{where}.weights", weights, "must have a weight for a source")
            self._check_table(f"{where}.weights", weights)
            before = start


def _check_source(name: Any, source: Any) -> None:
    """Raise a `UserError` if a source has no proper name, or is none, or isn't the mixture's."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        rule = "is not a name for a source; use letters, digits, hyphens, and underscores"
        raise UserError(f"data.source.sources: {name!r} {rule}")
    place = f"data.source.sources.{name}"
    if not isinstance(source, Source) or isinstance(source, Mixture):
        raise UserError(f"{place} names no source: choose one, as in +source@{place}=text")
    for door, default in MIXTURES.items():
        value = getattr(source, door)
        if value != default:
            raise UserError(
                f"{place}.{door}={as_typed(value)} has no effect in a mixture; set data.{door}"
            )


def _refuse(where: str, value: Any, rule: str) -> None:
    check(f"data.source.{where}", value, False, rule)
