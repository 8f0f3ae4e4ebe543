"""Whether a comparison is fair: what it refuses, and what it warns of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.evidence.runs import Measure, Runs
from lockstep.run.directory import (
    MAY_DIFFER,
    RunDirectory,
    differences,
    flat,
    some_of,
)

DECIDED = "tokens"  # the name by which a run recalls its tokens, as lockstep.tokens.prepare does
# What a run is called, where it is, and who hears of it.
NO_DIFFERENCE = (*MAY_DIFFER, "seed", "logger", "resume", "trust_run_dir")
# What a machine decides, with equal results.
OF_MACHINE = (
    *("launch.", "trainer.devices", "trainer.accelerator", "trainer.num_nodes", "data.root"),
    *("data.source.path", "data.source.val_path", "data.source.test_path", "data.source.num_proc"),
)
# What decides the tokens, but for these of its settings.
OF_TOKENS = ("data.source.", "data.fingerprint", "tokenizer")
NOT_OF_TOKENS = ("data.source.num_proc",)
OF_VALIDATION = ("val_tokens", "data.val_tokens", "data.source.val_fraction", "model.block_size")
RATES = ("lr", "learning_rate")  # the last part of a setting's name
OTHER_DATA = "can't be compared; use the same data, or --measure an accuracy"
MUCH_SLOWER = 1.2  # seconds per step of one side, divided by those of the other


@dataclass(frozen=True)
class Setting:
    """What one side trains.

    Attributes:
        name: of the side.
        values: its frozen configuration, of any seed.
        tokens: that a run trains with; 0: its data have none, or no fixed number in a sample.
        typed: the settings that only this side's words set; None for finished runs.
        samples: that a run trains with; 0: its settings don't say.
    """

    name: str
    values: dict[str, Any]
    tokens: int
    typed: frozenset[str] | None = None
    samples: int = 0

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
    """Raise a `UserError` if settings show that losses of the sides would be of other text."""
    if not measure.is_of_text:
        return
    base = settings[0]
    for variant in settings[1:]:
        lines = [line for line in differing_lines(base, variant) if _is_of_tokens(line)]
        if lines:
            raise UserError(
                f"{variant.name} and {base.name} have other data, {some_of(lines)}, so their "
                f"{measure.name} {OTHER_DATA}"
            )


def _is_of_tokens(line: str) -> bool:
    return line.startswith(OF_TOKENS) and not line.startswith(NOT_OF_TOKENS)


def refuse_other_tokens(groups: Sequence[Runs], measure: Measure) -> None:
    """Raise a `UserError` if finished runs that are compared have trained with other tokens.

    Args:
        groups: the finished runs of each side.
        measure: of losses, all runs must have the same tokens; of others, those of a side.
    """
    groups_of_runs = [[*of_side.values()] for of_side in groups]
    if measure.is_of_text:
        groups_of_runs = [[run for runs in groups_of_runs for run in runs]]
    for runs in groups_of_runs:
        tokens = [_tokens_of(run) for run in runs]
        for run, theirs in zip(runs, tokens, strict=True):
            if theirs != tokens[0]:
                raise UserError(
                    f"{runs[0].path} and {run.path} have other data, {str(tokens[0])[:8]} and "
                    f"{str(theirs)[:8]}, so their {measure.name} {OTHER_DATA}"
                )


def _tokens_of(run: RunDirectory) -> str | None:
    """Return the fingerprint of the tokens that a run has decided; None without token data."""
    decided = run.notes().get(DECIDED)
    return decided["fingerprint"] if decided else None


def warnings(settings: Sequence[Setting]) -> list[str]:
    """Return what makes the comparison of any variant with the base unfair, as lines."""
    base = settings[0]
    lines = []
    for variant in settings[1:]:
        names = f"{variant.name} and {base.name}"
        for unit in ("tokens", "samples"):
            ours, theirs = getattr(variant, unit), getattr(base, unit)
            if ours != theirs:
                lines.append(f"{names} train with {ours:,} and {theirs:,} {unit}")
                break
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
    settings = [*flat(base.values), *flat(variant.values)]
    rates = dict.fromkeys(name for name, _ in settings if name.rpartition(".")[2] in RATES)
    for rate in rates:
        if names != {rate}:  # else that is what they compare
            yield from _one_sided(rate, base, variant)


def _one_sided(rate: str, base: Setting, variant: Setting) -> Iterator[str]:
    ours = variant.value(rate)
    theirs = base.value(rate)
    if base.typed is None or variant.typed is None:
        if ours != theirs:
            yield (
                f"{variant.name} and {base.name} have {rate}={ours} and {theirs}, and differ in "
                "more: was each rate searched?"
            )
        return
    for one, other in ((base, variant), (variant, base)):
        is_one_sided = rate in (one.typed or ()) and rate not in (other.typed or ())
        if is_one_sided and ours != theirs:
            yield (
                f"{one.name} sets {rate}={one.value(rate)}, while {other.name} has its default, "
                f"{other.value(rate)}: search both"
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

    What the machine decides may differ.
    """
    lines = differences(values, setting.values, free=(*NO_DIFFERENCE, *OF_MACHINE))
    if lines:
        raise UserError(
            f"{folder} has finished runs of other settings: {some_of(lines)}; name another --folder"
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
