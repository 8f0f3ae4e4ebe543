"""Finds the first thing in which a run and its replay differ, and names it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from lockstep.checkpoints.reading import checkpoint_path
from lockstep.evidence.saved_states import differing_numbers, state_of
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.metrics.trace_file import FIXED, TraceRow, read_trace
from lockstep.run.directory import RunDirectory
from lockstep.settings import counted

COLUMNS = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "optim/skipped")


class Difference(NamedTuple):
    """The first difference of one kind."""

    step: int
    text: str


@dataclass
class Comparison:
    """What was compared of two runs, and the first difference of each kind.

    Attributes:
        counts: how many things of each kind were equal, and how many were compared.
        differences: by kind, in the order in which they say most.
    """

    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    differences: dict[str, Difference] = field(default_factory=dict)

    def add(self, kind: str, faults: dict[int, str], compared: int) -> None:
        """Note the `faults` of one kind, by step, of `compared` things."""
        self.counts[kind] = (compared - len(faults), compared)
        if faults:
            first = min(faults)
            self.differences[kind] = Difference(first, faults[first])

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    def first(self) -> Difference:
        """Return the earliest difference; of several in one step, the one that says most."""
        return min(self.differences.values(), key=lambda difference: difference.step)


class Recorded(NamedTuple):
    """What a run, or its replay, has left of some steps."""

    directory: RunDirectory
    hashes: dict[int, str]  # of the weights, by step
    arithmetic: dict[int, dict[str, Any]]  # what computed, from each of these steps on


def compare(
    run: Recorded, replay: Recorded, steps: range, saves: list[int], names: list[str]
) -> Comparison:
    """Compare all that two runs have of some steps.

    Args:
        run: the run.
        replay: the replay.
        steps: the optimizer steps.
        saves: those after which both have a checkpoint.
        names: of the tensors, in the optimizer's order.
    """
    comparison = Comparison()
    _compare_traces(comparison, run, replay, steps)
    states = {}
    for step in saves:
        paths = [checkpoint_path(side.directory.checkpoints, step) for side in (run, replay)]
        differing = differing_numbers(*(state_of(path, names) for path in paths))
        if differing:
            states[step] = _state_text(step, differing)
    comparison.add("saved states", states, len(saves))
    hashed = [step for step in steps if step in run.hashes and step in replay.hashes]
    hashes = {
        step: f"the hash of the weights after step {step}"
        for step in hashed
        if run.hashes[step] != replay.hashes[step]
    }
    comparison.add("hashes of weights", hashes, len(hashed))
    _compare_rows(comparison, run, replay, steps)
    return comparison


def _state_text(step: int, differing: dict[str, str]) -> str:
    name, fault = next(iter(differing.items()))
    others = len(differing) - 1
    more = f", and {counted(others, 'other tensor')}" if others else ""
    return f"in the state saved after step {step}, {name} {fault}{more}"


def _compare_rows(comparison: Comparison, run: Recorded, replay: Recorded, steps: range) -> None:
    ours, theirs = (rows_of(side.directory, steps) for side in (run, replay))
    common = sorted(ours.keys() & theirs.keys())
    faults: dict[int, str] = {}
    for before, step in pairwise([steps.start - 1, *common]):
        for name in COLUMNS:
            values = [side[step].get(name) for side in (ours, theirs)]
            if all(values) and values[0] != values[1]:
                where = f"in the row of step {step}, which begins after step {before}"
                faults.setdefault(step, f"{where}: {name} is {values[0]}, not {values[1]}")
    comparison.add("rows of metrics.csv", faults, len(common))


def rows_of(directory: RunDirectory, steps: range) -> dict[int, dict[str, str]]:
    """Return the rows of some steps, by step."""
    rows = read_metrics(directory.metrics).as_dicts()
    return {int(row[STEP]): row for row in rows if int(row[STEP]) in steps}


def _compare_traces(comparison: Comparison, run: Recorded, replay: Recorded, steps: range) -> None:
    columns, ours = _trace_of(run, steps)
    _, theirs = _trace_of(replay, steps)
    names = columns[len(FIXED) :]
    common = sorted(ours.keys() & theirs.keys())
    faults = {}
    for step in common:
        if ours[step] == theirs[step]:
            continue
        facts = facts_at(run, step)
        text = trace_text(ours[step], theirs[step], names, facts.get("micro_batches"))
        faults[step] = f"step {step}: {text}"
    comparison.add("steps of trace.csv", faults, len(common))


def _trace_of(side: Recorded, steps: range) -> tuple[list[str], dict[int, TraceRow]]:
    columns, rows = read_trace(side.directory.trace)
    return columns, {row.step: row for row in rows if row.step in steps}


def facts_at(side: Recorded, step: int) -> dict[str, Any]:
    """Return what computed an optimizer step; empty if that is not recorded."""
    starts = [start for start in side.arithmetic if start < step]
    return side.arithmetic[max(starts)] if starts else {}


def trace_text(ours: TraceRow, theirs: TraceRow, names: list[str], per_rank: int | None) -> str:
    """Say what of a step differs first, in the order in which it is computed.

    Args:
        ours: the run's row.
        theirs: the replay's.
        names: of the tensors.
        per_rank: micro-batches of a rank; None: unknown.
    """
    weights = _places(ours.weights, theirs.weights)
    if weights:
        return (
            f"{names[weights[0]]}{_more(weights[1:])}, before the step: a wrong update, or memory"
        )
    states = _places(ours.states, theirs.states)
    if states:
        return f"the optimizer's state of {names[states[0]]}{_more(states[1:])}, before the step"
    for what, run, replay in (
        ("the tokens", ours.tokens, theirs.tokens),
        ("the loss", ours.losses, theirs.losses),
        ("the gradients", ours.gradients, theirs.gradients),
    ):
        places = _places(run, replay)
        if not places:
            continue
        place = f"{what} of {_micro_batches(places, len(run), per_rank)}"
        tensors = _places(ours.tensors, theirs.tensors)
        if what == "the gradients" and tensors:  # backward begins at the last tensor
            return f"{place}, first of {names[tensors[-1]]}{_more(tensors[:-1], 'of ')}"
        return place
    return "the sum of the gradients of all micro-batches"


def _more(tensors: list[int], of: str = "") -> str:
    return f" and {of}{counted(len(tensors), 'other tensor')}" if tensors else ""


def _places(ours: list[str], theirs: list[str]) -> list[int]:
    """Return where two lists differ; where the lengths do, everywhere."""
    if len(ours) != len(theirs):
        return [*range(len(ours))]
    return [place for place, mine in enumerate(ours) if mine != theirs[place]]


def _micro_batches(places: list[int], count: int, per_rank: int | None) -> str:
    """Name micro-batches, and the rank that has computed them."""
    if len(places) == count and count > 1:
        return f"all {count} micro-batches"
    numbers = ", ".join(str(place + 1) for place in places)
    text = f"micro-batch {numbers} of {count}"
    if per_rank:
        ranks = sorted({place // per_rank for place in places})
        text += f" (rank {', '.join(map(str, ranks))})"
    return text
