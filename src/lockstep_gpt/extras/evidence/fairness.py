"""Whether a comparison is fair: what it refuses, and what it warns of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_gpt.config import settings_on_resume
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.evidence.measures import Measure
from lockstep_gpt.extras.evidence.sides import Runs
from lockstep_gpt.run.directory import MAY_DIFFER, differences, flat, some_of

# What a run is called, where it is, and who hears of it.
NO_DIFFERENCE = (*MAY_DIFFER, "seed", "logger", "resume", "trust_run_dir")
OF_VALIDATION = ("data.val_tokens", "data.val_fraction", "model.block_size")
RATE = "optim.lr"
MUCH_SLOWER = 1.2  # seconds per step of one side, divided by those of the other


@dataclass(frozen=True)
class Setting:
    """What one side trains.

    Attributes:
        name: of the side.
        values: its frozen configuration, of any seed, with the fingerprint of the data.
        tokens: that a run trains with.
        typed: the settings that only this side's words set; None for finished runs.
    """

    name: str
    values: dict[str, Any]
    tokens: int
    typed: frozenset[str] | None = None

    def value(self, name: str) -> Any:
        """Return a setting's value; None if it has none."""
        return dict(flat(self.values)).get(name)


def refuse_equal(settings: Sequence[Setting]) -> None:
    """Raise a `UserError` if two sides train the same."""
    for place, one in enumerate(settings):
        for other in settings[place + 1 :]:
            if not differing_lines(one, other):
                raise UserError(
                    f"{one.name} and {other.name} have the same settings; give one of them a value "
                    "that the other doesn't have"
                )


def refuse_other_data(settings: Sequence[Setting], measure: Measure) -> None:
    """Raise a `UserError` if losses of the sides are of other text, so can't be compared."""
    base = settings[0]
    ours = base.value("data.fingerprint")
    for variant in settings[1:]:
        theirs = variant.value("data.fingerprint")
        if measure.is_of_text and ours != theirs:
            raise UserError(
                f"{base.name} and {variant.name} have other data, {str(ours)[:8]} and "
                f"{str(theirs)[:8]}, so their {measure.name} can't be compared; use the same data, "
                "or --measure an accuracy"
            )


def warnings(settings: Sequence[Setting]) -> list[str]:
    """Return what makes the comparison of any variant with the base unfair, as lines."""
    base = settings[0]
    lines = []
    for variant in settings[1:]:
        names = f"{variant.name} and {base.name}"
        if variant.tokens != base.tokens:
            lines.append(f"{names} train with {variant.tokens:,} and {base.tokens:,} tokens")
        for name in OF_VALIDATION:
            ours = variant.value(name)
            theirs = base.value(name)
            if ours != theirs:
                lines.append(f"{names} validate on other windows: {name}={ours} and {theirs}")
        lines += _one_sided_rate(base, variant)
    return lines


def _one_sided_rate(base: Setting, variant: Setting) -> Iterator[str]:
    """Yield a line if only one side seems to have searched for its learning rate."""
    names = {line.partition("=")[0] for line in differing_lines(base, variant)}
    ours = variant.value(RATE)
    theirs = base.value(RATE)
    if names == {RATE}:  # that is what they compare
        return
    if base.typed is None or variant.typed is None:
        if ours != theirs:
            yield (
                f"{variant.name} and {base.name} have {RATE}={ours} and {theirs}, and differ in "
                "more: was each rate searched?"
            )
        return
    for one, other in ((base, variant), (variant, base)):
        is_one_sided = RATE in (one.typed or ()) and RATE not in (other.typed or ())
        if is_one_sided and ours != theirs:
            yield (
                f"{one.name} sets {RATE}={one.value(RATE)}, while {other.name} has its default, "
                f"{other.value(RATE)}: search both"
            )


def warnings_of_time(names: Sequence[str], groups: Sequence[Runs]) -> list[str]:
    """Return a line for each variant whose training takes much more or less time than the base's.

    Args:
        names: of the base and the variants.
        groups: the finished runs of each.
    """
    base, *variants = [_seconds_of_run(runs) for runs in groups]
    return [
        f"a run of {name} takes {seconds:.3g} s, and of {names[0]} {base:.3g} s: for equal "
        "time, use --measure seconds_to=LOSS"
        for name, seconds in zip(names[1:], variants, strict=True)
        if max(seconds, base) > MUCH_SLOWER * min(seconds, base)
    ]


def _seconds_of_run(runs: Runs) -> float:
    """Return the median seconds of training, by each run's median step; NaN without runs."""
    summaries = [run.read_summary() for run in runs.values()]
    seconds = [
        summary["step"] * (summary.get("step_seconds_p50") or math.nan) for summary in summaries
    ]
    return statistics.median(seconds) if seconds else math.nan


def differing_lines(one: Setting, other: Setting) -> list[str]:
    """Return the settings that differ, as lines that begin with NAME=."""
    return differences(one.values, other.values, free=NO_DIFFERENCE)


def refuse_other_runs(folder: Path, setting: Setting, values: dict[str, Any]) -> None:
    """Raise a `UserError` if a finished run in `folder` has other settings than its side has now.

    Settings that are still open, or that the machine decides, may differ.
    """
    machine = settings_on_resume("machine", setting.value("data._target_"))
    free = (*NO_DIFFERENCE, "trainer.", *machine)
    closed = [
        line
        for line in differences(values, setting.values, free=free)
        if setting.value(line.partition("=")[0]) not in (None, "auto")
    ]
    if setting.value("data.fingerprint") != values["data"]["fingerprint"]:
        closed.append("other data")
    if closed:
        raise UserError(
            f"{folder} has finished runs of other settings: {some_of(closed)}; name another "
            "--folder"
        )


def refuse_mixture(name: str, values: Sequence[dict[str, Any]]) -> None:
    """Raise a `UserError` if runs of one group differ in more than their seeds."""
    for other in values[1:]:
        lines = differences(values[0], other, free=NO_DIFFERENCE)
        if lines:
            raise UserError(
                f"the runs of {name} differ in more than the seed: {some_of(lines)}; name runs of "
                "one setting"
            )
