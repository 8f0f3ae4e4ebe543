"""The `compare` command: is a variant better than the base? Runs in pairs, and a verdict.

sides -> what each would train, and whether that is fair -> pairs of runs -> verdicts, page
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep import project, stop_signals
from lockstep.damaged_files import read_object
from lockstep.errors import UserError
from lockstep.evidence import fairness
from lockstep.evidence.fairness import Setting
from lockstep.evidence.pairs import Budget, PairedRuns, plan_of
from lockstep.evidence.report import PAGE, RESULT, Report
from lockstep.evidence.runs import (
    MEASURES,
    Side,
    common_seeds,
    finished_groups,
    measure_of,
    sides_of,
)
from lockstep.evidence.verdicts import Judge
from lockstep.evidence.workers import (
    Workers,
    environments_of,
    started_workers,
)
from lockstep.launch import launcher
from lockstep.run.lock import RunLock


def main(arguments: list[str]) -> int:
    """Compare finished runs, or train them first; print a table and the verdicts."""
    options = _options(arguments)
    compare = _compare_finished if options.runs else _compare_trained
    if not options.json:
        compare(options)
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        report = compare(options)
    print(json.dumps(report.as_values()))
    return 0


def _new_report(
    options: argparse.Namespace, sides: list[Side], settings: Sequence[Setting]
) -> Report:
    error = 1 - options.confidence
    has_tokens = any(setting.tokens for setting in settings)
    measures = [measure_of(name, has_tokens) for name in options.measure]
    judges = [Judge(measure, error, len(sides) - 1) for measure in measures]
    judges[0] = replace(judges[0], margin=options.margin)
    return Report(judges, sides)


def _compare_finished(options: argparse.Namespace) -> Report:
    """Compare groups of finished runs."""
    if len(options.runs) < 2:
        raise UserError("--runs needs a pattern for the base and one for each variant")
    if options.variant or options.base or options.overrides:
        raise UserError("--runs compares finished runs; leave out --base, --variant, and settings")
    sides, groups = finished_groups(options.runs)
    seeds = common_seeds(sides, groups)
    groups = [{seed: runs[seed] for seed in seeds} for runs in groups]
    settings = []
    for side, runs in zip(sides, groups, strict=True):
        values = [run.values() for run in runs.values()]
        fairness.refuse_mixture(side.name, values)
        summary = runs[seeds[0]].read_summary()
        samples, tokens = (int(summary.get(unit, 0)) for unit in ("samples", "tokens"))
        settings.append(Setting(side.name, values[0], tokens, samples=samples))
    report = _new_report(options, sides, settings)
    fewest = report.judges[0].fewest_pairs
    if len(seeds) < fewest:
        raise UserError(f"{len(seeds)} common seeds are too few for any answer; train {fewest}")
    report.check(settings)
    report.update(groups)
    report.warn_of_time(groups)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        report.write(options.folder)
    report.print()
    return report


def _compare_trained(options: argparse.Namespace) -> Report:
    """Train pairs until each variant has an answer, or the budget is spent."""
    if launcher.is_inside_launcher():
        raise UserError("compare starts ranks itself; run it without torchrun or srun")
    if not options.variant:
        raise UserError('compare needs a variant, as in --variant "optim=muon", or --runs')
    stop_signals.install(has_keyboard=True).interrupt()
    sides = sides_of([options.base, *options.variant])
    plans = [plan_of(side, options.overrides) for side in sides]
    settings = [plan.setting for plan in plans]
    report = _new_report(options, sides, settings)
    tokens_of_pair = sum(setting.tokens for setting in settings)
    budget = Budget(options.pairs, options.tokens, options.hours)
    budget.refuse_too_small(report.judges[0].fewest_pairs, tokens_of_pair)
    report.check(settings)
    report.refuse_other_data(settings)
    for warning in report.warnings:
        print(f"unfair? {warning}", flush=True)
    folder = options.folder or Path("runs", _name(sides, options.overrides))
    values = settings[0].values
    if not isinstance(values.get("seed"), int):
        raise UserError("compare trains pairs of runs with equal seeds; give the program a seed")
    seeds = range(values["seed"], values["seed"] + budget.most_pairs(tokens_of_pair))
    loggers = values.get("logger") or {}
    runs = PairedRuns(folder, tuple(sides), tuple(options.overrides), loggers, seeds)
    runs.refuse_other_runs(settings)
    environments = environments_of(plans[0].placement, _runs_at_once(options, report))
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder / ".lock", str(folder))
    with lock.of_command(), started_workers(environments) as workers:
        _train_pairs(runs, workers, report, budget)
    report.print()
    print(f"{folder / PAGE}: open it in any browser")
    return report


def _runs_at_once(options: argparse.Namespace, report: Report) -> int | None:
    """Return how many runs train at the same time; None: what fits.

    Raises:
        UserError: they would slow each other down, and their speed is measured.
    """
    of_speed = [judge.measure.name for judge in report.judges if judge.measure.is_of_speed]
    at_once: int | None = options.at_once
    if not of_speed:
        return at_once
    if at_once not in (None, 1):
        raise UserError(
            f"--at-once={at_once}: runs would slow each other down; leave it out to measure "
            f"{of_speed[0]}"
        )
    return 1


def _train_pairs(runs: PairedRuns, workers: Workers, report: Report, budget: Budget) -> None:
    """Train the pairs that are missing, look after each round, and write the result."""
    seconds_before = _seconds_so_far(runs.folder)
    begin = time.monotonic()
    in_round = max(1, workers.count // len(runs.sides))  # pairs
    while True:
        groups = runs.finished()
        comparison = report.update(groups)
        seconds = seconds_before + time.monotonic() - begin
        pairs = max(len(comparison.seeds_of(place)) for place in range(1, len(runs.sides)))
        if pairs:
            report.write(runs.folder, seconds=seconds, command=_command(runs))
            print(report.progress(), flush=True)
        variants = comparison.open_variants()
        budget.refuse_too_few_hours(comparison.judge.fewest_pairs, pairs, seconds)
        missing = comparison.missing_seeds(variants, runs.seeds)[:in_round]
        if not missing or not budget.has_time(pairs, seconds):
            break
        runs.train(workers, [runs.sides[place] for place in (0, *variants)], missing)
    if workers.count == 1:  # else their times depend on each other
        report.warn_of_time(groups)
    report.write(runs.folder, seconds=seconds, command=_command(runs))


def _seconds_so_far(folder: Path) -> float:
    """Return how long earlier commands of this comparison took."""
    values, _ = read_object(folder / RESULT)
    return float(values.get("seconds", 0))


def _command(runs: PairedRuns) -> str:
    """Return the command that trains these sides, without its budget."""
    words = []
    if runs.sides[0].words:
        words += ["--base", shlex.join(runs.sides[0].words)]
    for side in runs.sides[1:]:
        words += ["--variant", shlex.join(side.words)]
    return f"{project.typed('compare')} {shlex.join([*words, *runs.shared])}"


def _name(sides: Sequence[Side], shared: Sequence[str]) -> str:
    """Return a folder's name that the same command has again, whatever its budget."""
    content = json.dumps([[side.words for side in sides], list(shared)])
    names = "-".join(side.folder for side in sides)[:60]
    return f"compare-{names}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


def _options(arguments: list[str]) -> argparse.Namespace:
    options = _parser().parse_intermixed_args(arguments)
    options.measure = options.measure or ["val_loss"]
    for name in ("pairs", "tokens", "hours", "margin", "at_once"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')}={value} must be above 0")
    if not 0.5 <= options.confidence < 1:
        raise UserError(f"--confidence={options.confidence} must be from 0.5 to below 1")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=project.typed("compare"),
        description="Train a base and variants in pairs with equal seeds, until it is clear which "
        "is better, or a budget is spent. The same command continues.",
        epilog='example: compare --base "optim=adamw" --variant "optim=muon" max_steps=300',
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="NAME=VALUE", help="settings of all sides, as of train")
    add("--base", default="", metavar="WORDS", help='its own settings, as in "optim=adamw"')
    add("--variant", action="append", default=[], metavar="WORDS", help="may be repeated")
    add("--runs", nargs="+", metavar="PATTERN", help="finished runs instead: base, variants")
    add("--pairs", type=int, metavar="N", help="at most; 20 without any limit")
    add("--tokens", type=float, metavar="N", help="at most, of all runs together")
    add("--hours", type=float, metavar="H", help="at most")
    add("--margin", type=float, metavar="M", help="a smaller difference doesn't matter")
    add("--confidence", type=float, default=0.95, metavar="P", help="0.95 by default")
    measures = f"{MEASURES}; may be repeated, and the first decides (default: val_loss)"
    add("--measure", action="append", metavar="NAME", help=measures)
    add("--at-once", type=int, metavar="N", help="runs at the same time (default: what fits)")
    add("--json", action="store_true", help="print the result as JSON; all else goes to stderr")
    add("--folder", type=Path, help="of the comparison (default: runs/compare-...)")
    return parser
