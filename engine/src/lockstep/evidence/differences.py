"""Finds the first thing in which a run and its replay differ, and names it.

    rows, traces, hashes, and the numbers of saved states -> the first difference of each kind

Where bits can't be compared, it says whether a difference can come from rounding. Bits differ where
the processor, the library, or the order of sums does. Two replays on this machine show what that
may cause: one as it is, and one in which each weight gets one more rounding error in each step. A
run that differs from the first by more than `ROUNDING_MARGIN` times as much as the second does is
not explained by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.checkpoints.content import samples_of
from lockstep.checkpoints.reading import checkpoint_path, read_checkpoint
from lockstep.metrics.rows import STEP, read_metrics
from lockstep.metrics.trace_file import FIXED, TraceRow, read_trace
from lockstep.run.directory import RunDirectory
from lockstep.settings import counted

if TYPE_CHECKING:
    from torch import Tensor

# Columns of metrics.csv that are compared, bit by bit, and those compared up to rounding.
COLUMNS = ("train/loss", "val/loss", "optim/lr", "optim/grad_norm", "optim/skipped")
ROUNDED = ("train/loss", "val/loss", "optim/grad_norm")
# What a run goes on from. The rest depends on where it was saved, or says what computed it.
COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "means")
SCALARS = ("global_step",)
INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # by their bytes

ROUNDING_MARGIN = 10.0
# The relative rounding error of what multiplies matrices.
ROUNDING_ERRORS = {
    "64-true": 2.0**-53,
    "32-true": 2.0**-24,
    "16-mixed": 2.0**-11,
    "bf16-mixed": 2.0**-9,
}


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


def state_of(path: Path, names: list[str]) -> dict[str, Any]:
    """Return the tensors and other values of a checkpoint by what a person calls them.

    Args:
        path: the checkpoint.
        names: of the tensors, in the optimizer's order.

    Raises:
        UserError: it is damaged.
    """
    content = read_checkpoint(path)
    kept = {key: content[key] for key in (*COMPARED, *SCALARS) if key in content}
    kept["samples"] = samples_of(content)
    return {_title(keys, names): value for keys, value in _leaves(kept, ())}


def _leaves(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*keys, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*keys, index))
    else:
        yield keys, value


def _title(keys: tuple[Any, ...], names: list[str]) -> str:
    if keys[0] == "state_dict":
        return str(keys[1])
    if keys[0] == "optimizer_states" and keys[2] == "state":
        return f"the optimizer's {keys[4]} of {names[keys[3]]}"
    return ".".join(map(str, keys))


def differing_numbers(run: dict[str, Any], replay: dict[str, Any]) -> dict[str, str]:
    """Return, for each name whose bits differ, how they do."""
    differing = {}
    for name in {**run, **replay}:
        fault = _difference(run.get(name), replay.get(name))
        if fault:
            differing[name] = fault
    return differing


def _difference(ours: Any, theirs: Any) -> str | None:
    import torch

    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        same = ours == theirs or (ours != ours and theirs != theirs)  # NaN is NaN
        return None if same else f"is {ours}, not {theirs}"
    if ours.numel() != theirs.numel() or ours.dtype != theirs.dtype:
        return f"is {ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    changed = _bits(ours) ^ _bits(theirs)
    places = changed.nonzero().flatten()
    if not len(places):
        return None
    if len(places) > 1:
        return f"differs in {len(places):,} of {counted(ours.numel(), 'number')}"
    place = int(places[0])
    mask = int(changed[place]) & (2 ** (8 * ours.itemsize) - 1)
    bits = [str(bit) for bit in range(8 * ours.itemsize) if mask >> bit & 1]
    label = "bit" if len(bits) == 1 else "bits"
    return f"differs in number {place} of {ours.numel()}, {label} {', '.join(bits)}"


def _bits(tensor: Tensor) -> Tensor:
    import torch

    integers = getattr(torch, INTEGERS[tensor.itemsize])
    return tensor.detach().cpu().contiguous().flatten().view(integers)


class Rounding(NamedTuple):
    """The largest difference, in multiples of what the noise causes."""

    ratio: float
    place: str
    difference: float
    allowed: float  # of the replay with noise

    @property
    def is_explained(self) -> bool:
        """Return whether rounding can be the cause."""
        return self.ratio <= ROUNDING_MARGIN


def _rounding(place: str, difference: float, allowed: float) -> Rounding:
    ratio = 0.0
    if difference:
        ratio = difference / allowed if allowed else math.inf
    return Rounding(ratio, place, difference, allowed)


def rounding_error(precision: str) -> float:
    """Return the relative rounding error of a precision, as Lightning names it."""
    return ROUNDING_ERRORS.get(precision, 2.0**-24)


def largest_of_rows(rows: list[list[dict[str, str]]], error: float) -> Rounding:
    """Compare the losses and norms of rows with the same steps.

    Args:
        rows: those of the run, of the replay, and of the replay with noise.
        error: the relative rounding error.
    """
    worst = Rounding(0.0, "no row", 0.0, 0.0)
    reached = dict.fromkeys(ROUNDED, 0.0)  # differences with noise so far
    for run, plain, noisy in zip(*rows, strict=True):
        for name in ROUNDED:
            if not (run.get(name) and plain.get(name) and noisy.get(name)):
                continue
            value = float(plain[name])
            reached[name] = max(reached[name], abs(value - float(noisy[name])))
            allowed = max(reached[name], error * abs(value))
            difference = abs(value - float(run[name]))
            place = f"{name} of step {run['trainer/step']}"
            worst = max(worst, _rounding(place, difference, allowed))
    return worst


def largest_of_states(states: list[dict[str, Any]], step: int, error: float) -> Rounding:
    """Compare the weights of states saved after one step: of run, replay, and replay with noise."""
    import torch

    run, plain, noisy = states
    worst = Rounding(0.0, "no tensor", 0.0, 0.0)
    for name, weight in plain.items():
        is_weight = isinstance(weight, torch.Tensor) and "optimizer" not in name
        if not is_weight or not weight.is_floating_point() or name not in run:
            continue
        value = weight.double()
        floor = error * float(value.norm())
        allowed = max(float((value - noisy[name].double()).norm()), floor)
        difference = float((value - run[name].double()).norm())
        place = f"{name} after step {step}"
        worst = max(worst, _rounding(place, difference, allowed))
    return worst
