"""The `verify` command: computes steps of a run again, and compares every bit it has kept."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import project
from lockstep.batch import exact_world_sizes
from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    read_checkpoint,
    step_of,
)
from lockstep.errors import UserError
from lockstep.evidence.differences import (
    ROUNDING_MARGIN,
    Comparison,
    Recorded,
    compare,
    facts_at,
    largest_of_rows,
    largest_of_states,
    rounding_error,
    rows_of,
    state_of,
)
from lockstep.evidence.replay import (
    NAMES,
    Steps,
    refuse_changed_settings,
    replay,
)
from lockstep.run.directory import RunDirectory
from lockstep.run.source_code import changes_since
from lockstep.settings import counted, node_of, precision_of

# Bits depend on these, and without exact sums on the others too.
DECISIVE = ("processor", "torch", "threads")
OF_SUMS = ("ranks", "micro_batches", "strategy")


class Outcome(NamedTuple):
    """The result of a check."""

    verdict: str  # equal, rounding, different, unstable
    line: str
    details: dict[str, Any]


def main(arguments: list[str]) -> int:
    """Verify a run, and print the result; return 1 unless it is confirmed."""
    options = _parser().parse_args(arguments)
    run = RunDirectory(options.run)
    if not run.config.is_file():
        raise UserError(f"{run.path} has no {run.config.name}; name the directory of a run")
    recorded = recorded_of(run)
    steps = steps_of(recorded, options.start, options.end, options.devices)
    refuse_changed_settings(run, steps.start)
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        outcome = verify(recorded, steps, Path(folder))
    if options.json:
        details = {"run": str(run.path), "verdict": outcome.verdict, "result": outcome.line}
        print(json.dumps({**details, **outcome.details}))
    else:
        _print(run, steps, outcome)
    return 0 if outcome.verdict in ("equal", "rounding") else 1


def recorded_of(run: RunDirectory) -> Recorded:
    """Return what a run's newest checkpoint says about all of it, or raise a `UserError`."""
    present = checkpoints_in(run.checkpoints)
    if not present:
        raise UserError(f"{run.path} has no checkpoint to compare with; train it until it saves")
    content = read_checkpoint(present[-1])
    hashes = {int(step): sha256 for step, sha256 in content.get("weights", {}).items()}
    return Recorded(run, hashes, content.get("arithmetic", {}))


def steps_of(recorded: Recorded, start: int, end: int | None, devices: int | None) -> Steps:
    """Return the steps to compute, or raise a `UserError` if they don't fit the run."""
    run = recorded.directory
    present = [step_of(path) for path in checkpoints_in(run.checkpoints)]
    if start and start not in present:
        known = ", ".join(map(str, [0, *present]))
        raise UserError(f"--from={start} isn't a saved state of {run.path}; it has {known}")
    comparable = sorted({*recorded.hashes, *present})
    if end is None:
        end = present[-1]
    ends = [step for step in comparable if step > start]
    if end not in ends:
        known = ", ".join(map(str, ends)) or "none"
        raise UserError(f"--to={end} isn't a saved step after {start}; {run.path} has {known}")
    saves = [step for step in ends if step <= end]
    count, has_gpu = _devices(recorded, end, devices)
    return Steps(run, start, end, saves, count, has_gpu, _micro_size(recorded, end))


def _micro_size(recorded: Recorded, end: int) -> int | None:
    """Return how many samples the run's micro-batches had; None if that is not recorded."""
    values = recorded.directory.resolved()
    facts = facts_at(recorded, end)
    global_size: int | None = node_of(values, "batch").get("global_size")
    splits_model = node_of(values, "strategy").get("tensor_parallel", 1) > 1
    if not facts or global_size is None or splits_model:
        return None
    micro_batches: int = facts["ranks"] * facts["micro_batches"]
    return global_size // micro_batches


def _devices(recorded: Recorded, end: int, chosen: int | None) -> tuple[int, bool]:
    """Return how many devices to use, and whether they are GPUs."""
    values = recorded.directory.resolved()
    has_gpu = False
    count = facts_at(recorded, end).get("ranks", 1)
    if node_of(values, "trainer").get("accelerator") != "cpu":
        import torch

        has_gpu = torch.cuda.is_available()
        if has_gpu:
            count = min(count, torch.cuda.device_count())
    sizes = [count]
    batch = node_of(values, "batch")
    global_size, exact = (batch.get(name) for name in ("global_size", "exact_micro_size"))
    if exact and global_size:
        sizes = exact_world_sizes(global_size, exact)
    return chosen or max(size for size in sizes if size <= max(count, 1)), has_gpu


def verify(run: Recorded, steps: Steps, folder: Path) -> Outcome:
    """Compute the steps, in `folder`, and compare.

    If bits differ although nothing else does, the steps are computed once more: two replays that
    differ from each other show that it is this machine that computes wrongly.
    """
    first = recorded_of(replay(steps, folder / "first"))
    numbers = range(steps.start + 1, steps.end + 1)
    present = {step_of(path) for path in checkpoints_in(steps.run.checkpoints)}
    saves = [step for step in steps.saves if step in present]
    names = json.loads((first.directory.path / NAMES).read_text(encoding="utf-8"))
    comparison = compare(run, first, numbers, saves, names)
    details = _details(comparison)
    if comparison.is_equal:
        return Outcome("equal", f"equal: all bits that the run has kept of {_span(steps)}", details)
    reasons = other_arithmetic(run, first, steps)
    if reasons:
        return _rounding(run, first, steps, folder, reasons, saves, names, details)
    second = recorded_of(replay(steps, folder / "second"))
    again = compare(first, second, numbers, steps.saves, names)
    if not again.is_equal:
        place = again.first().text
        line = f"this machine is unstable: two replays differ from each other, first {place}"
        return Outcome("unstable", line, details)
    return Outcome("different", f"different: {comparison.first().text}", details)


def _details(comparison: Comparison) -> dict[str, Any]:
    counts = {kind: {"equal": equal, "of": of} for kind, (equal, of) in comparison.counts.items()}
    differences = {kind: first.text for kind, first in comparison.differences.items()}
    return {"compared": counts, "differences": differences}


def other_arithmetic(run: Recorded, again: Recorded, steps: Steps) -> list[str]:
    """Return in what, besides its settings, a run was computed otherwise than its replay."""
    if not run.arithmetic:  # damaged, or removed
        return ["no record of its processor"]
    ours = facts_at(again, steps.end)
    batch = node_of(steps.run.resolved(), "batch")
    is_exact = batch.get("exact_micro_size") is not None
    names = DECISIVE if is_exact else (*DECISIVE, *OF_SUMS)
    reasons = []
    starts = [start for start in run.arithmetic if start < steps.end]
    for start in starts:
        is_over = any(start < later <= steps.start for later in starts)
        if is_over:
            continue
        theirs = run.arithmetic[start]
        for name in names:
            if theirs.get(name) != ours.get(name):
                label = name.replace("_", "-")
                reasons.append(f"{label} {theirs.get(name)}, here {ours.get(name)}")
        changed = changes_since(theirs.get("code"))
        if changed:
            reasons.append(f"other code in {changed}")
    return [*dict.fromkeys(reasons)]


def _rounding(
    run: Recorded,
    plain: Recorded,
    steps: Steps,
    folder: Path,
    reasons: list[str],
    saves: list[int],
    names: list[str],
    details: dict[str, Any],
) -> Outcome:
    """Compare with what rounding allows, where bits can't be compared."""
    error = rounding_error(precision_of(steps.run.resolved()))
    noisy = recorded_of(replay(steps, folder / "noisy", error))
    numbers = range(steps.start + 1, steps.end + 1)
    sides = (run, plain, noisy)
    rows = [rows_of(side.directory, numbers) for side in sides]
    common = sorted(rows[0].keys() & rows[1].keys() & rows[2].keys())
    worst = largest_of_rows([[side[step] for step in common] for side in rows], error)
    for step in saves:
        paths = [checkpoint_path(side.directory.checkpoints, step) for side in sides]
        states = [state_of(path, names) for path in paths]
        worst = max(worst, largest_of_states(states, step, error))
    measures = {"ratio": worst.ratio, "difference": worst.difference, "allowed": worst.allowed}
    details |= {"reasons": reasons, "rounding": {"place": worst.place, **measures}}
    beginning = f"bits can't be compared (the run had {'; '.join(reasons)}); "
    measured = (
        f"{worst.place} differs by {worst.difference:.2g}, {worst.ratio:.2g} times what rounding "
        f"errors in each step do here"
    )
    if worst.is_explained:
        line = f"{beginning}rounding explains the differences: {measured}"
        return Outcome("rounding", line, details)
    line = f"{beginning}different: {measured}, more than {ROUNDING_MARGIN:g} times"
    return Outcome("different", line, details)


def _span(steps: Steps) -> str:
    return f"steps {steps.start + 1} to {steps.end}"


def _print(run: RunDirectory, steps: Steps, outcome: Outcome) -> None:
    kind = "GPU" if steps.has_gpu else "CPU rank"
    print(f"{run.path}: {_span(steps)}, computed again on {counted(steps.devices, kind)}")
    for kind, count in outcome.details["compared"].items():
        if count["of"]:
            print(f"  {kind:<20} {count['equal']} of {count['of']} equal")
    if "reasons" not in outcome.details:  # else bits can't be compared
        for text in outcome.details["differences"].values():
            if text not in outcome.line:
                print(f"  differs: {text}")
    print(outcome.line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=project.typed("verify"),
        description="Compute steps of a run again on this machine, and compare every bit that the "
        "run has kept. Exit status 1: it differs.",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run directory")
    starts = "start after this step, which must be saved (default: 0, the initial weights)"
    add("--from", type=int, default=0, metavar="STEP", dest="start", help=starts)
    ends = "end after this step, which must have been saved (default: the newest)"
    add("--to", type=int, metavar="STEP", dest="end", help=ends)
    add("--devices", type=int, metavar="N", help="devices to use (default: as many as the run's)")
    add("--json", action="store_true", help="print one line of JSON")
    return parser
