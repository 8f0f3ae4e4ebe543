"""Trains the runs of a comparison in pairs: same seed, same order, same validation windows.

A budget says when it ends without an answer: after some pairs, tokens, or hours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lockstep import project, stop_signals
from lockstep.building import build
from lockstep.errors import ReportedError, RunError, UserError
from lockstep.evidence.fairness import Setting, refuse_other_runs
from lockstep.evidence.runs import Side, is_finished
from lockstep.evidence.workers import Job, Workers
from lockstep.exits import after_signal
from lockstep.launch import composed, devices, flags, hydra_job, targets
from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.main import training
from lockstep.launch.placement import Placement
from lockstep.run.directory import RunDirectory

OURS = ("run_dir", "run_name", "resume")  # settings that a comparison sets itself

PAIRS = 20  # at most, without another limit
HOUR = 3600.0  # seconds


@dataclass(frozen=True)
class Plan:
    """What one side trains, as composed before anything runs."""

    setting: Setting
    placement: Placement


def plan_of(side: Side, shared: Sequence[str]) -> Plan:
    """Compose what a side trains.

    Raises:
        UserError: a word is wrong, or belongs to the comparison.
    """
    project.current().refuse_to_train_nothing()
    words = [*shared, *side.words]
    for word in words:
        name = word.partition("=")[0]
        if name in OURS or (name == "seed" and word in side.words):
            raise UserError(f"{word}: compare sets {name} for each run; remove it")

    def job(config: DictConfig) -> Plan:
        values = hydra_job.values_to_freeze(config)
        targets.refuse_mistakes(values, {"*": ("*",)})
        placement = devices.found(values, LaunchSettings.of(values))
        typed = frozenset(word.partition("=")[0].lstrip("+~") for word in side.words)
        samples = _samples(config, placement)
        tokens = samples * OmegaConf.select(config, "data.block_size", default=0)
        setting = Setting(side.name, values, tokens, typed, samples)
        return Plan(setting, placement)

    return flags.each_job(training(), words, job)[0]


def _samples(config: DictConfig, placement: Placement) -> int:
    """Return how many samples a run trains with; 0 if its settings don't say."""
    steps = config.get("max_steps")
    if steps is None or "_target_" not in (config.get("batch") or {}):
        return 0
    tensor_parallel = OmegaConf.select(config, "strategy.tensor_parallel", default=1)
    batch = build(config.batch).spread_over(placement.devices, placement.nodes, tensor_parallel)
    samples: int = steps * batch.global_size
    return samples


@dataclass(frozen=True)
class PairedRuns:
    """The runs of a comparison, in folders by side and seed.

    Attributes:
        folder: of the comparison.
        sides: the base and the variants.
        shared: overrides of all sides.
        loggers: overrides of all sides that put their runs into one group.
        seeds: in the order of the pairs.
    """

    folder: Path
    sides: tuple[Side, ...]
    shared: tuple[str, ...]
    loggers: dict[str, Any]
    seeds: range

    def run(self, side: Side, seed: int) -> RunDirectory:
        """Return the directory of a run."""
        return RunDirectory(self.folder / side.folder / str(seed))

    def finished(self) -> list[dict[int, RunDirectory]]:
        """Return the finished runs of each side, by seed."""
        return [self._finished_of(side) for side in self.sides]

    def _finished_of(self, side: Side) -> dict[int, RunDirectory]:
        # Only those that are there: without a limit of pairs, there are a million seeds.
        names = (path.name for path in (self.folder / side.folder).glob("*"))
        present = sorted(int(name) for name in names if name.isdigit())
        runs = {seed: self.run(side, seed) for seed in present if seed in self.seeds}
        return {seed: run for seed, run in runs.items() if is_finished(run)}

    def refuse_other_runs(self, settings: Sequence[Setting]) -> None:
        """Raise a `UserError` if finished runs here are not those of the sides' settings."""
        for setting, runs in zip(settings, self.finished(), strict=True):
            for run in runs.values():
                refuse_other_runs(self.folder, setting, run.values())

    def train(self, workers: Workers, sides: Sequence[Side], seeds: Sequence[int]) -> None:
        """Train the runs of some pairs that aren't finished.

        Raises:
            RunError: one failed.
            ReportedError: a signal stopped them.
        """
        jobs = {}
        for seed in seeds:
            for side in sides:
                if not is_finished(self.run(side, seed)):
                    jobs[self._job(side, seed)] = (side, seed)
        statuses = workers.train([*jobs])
        signum = stop_signals.received.first
        if signum is not None:
            print(f"stopped by {signum.name}; the same command continues", file=sys.stderr)
            raise ReportedError(after_signal(signum))
        for job, status in statuses.items():
            if status:
                raise RunError(self._failure(*jobs[job], job, status))

    def _job(self, side: Side, seed: int) -> Job:
        run = self.run(side, seed)
        run.path.parent.mkdir(parents=True, exist_ok=True)
        words = (
            *(*self.shared, *side.words, f"seed={seed}", "resume=auto"),
            f"run_dir={run.path}",
            composed.quoted(f"run_name={side.folder}-{seed}"),
            *self._logger_words(side, seed),
        )
        return Job(words, run.path.with_name(f"{seed}.log"))

    def _logger_words(self, side: Side, seed: int) -> list[str]:
        """Return the words that put a run into the comparison's group, with tags of its own."""
        words = []
        for name, logger in self.loggers.items():
            if not isinstance(logger, dict):
                continue
            if "group" in logger and logger["group"] is None:
                words.append(composed.quoted(f"logger.{name}.group={self.folder.name}"))
            if "tags" in logger:
                tags = [*(logger["tags"] or []), side.folder, f"seed-{seed}"]
                words.append(f"logger.{name}.tags={json.dumps(tags)}")
        return words

    def _failure(self, side: Side, seed: int, job: Job, status: int) -> str:
        error = self.run(side, seed).read_failure().get("error")
        if error is None:
            lines = job.log.read_text("utf-8", errors="replace").splitlines()
            error = next(filter(str.strip, reversed(lines)), f"status {status}")
        return (
            f"{side.name}, seed {seed}, failed: {error}; {job.log} has more; then the same command "
            "continues"
        )


@dataclass(frozen=True)
class Budget:
    """The limits of a comparison; None where there is none.

    Attributes:
        pairs: of runs.
        tokens: that all runs together train with.
        hours: of the comparison, all its parts together.
    """

    pairs: int | None = None
    tokens: float | None = None
    hours: float | None = None

    def refuse_too_small(self, fewest: int, tokens_of_pair: int) -> None:
        """Raise a `UserError` if the budget ends before `fewest` pairs, which have a verdict."""
        if self.pairs is not None and self.pairs < fewest:
            raise UserError(
                f"--pairs={self.pairs} are too few for any answer; give at least {fewest}"
            )
        if self.tokens is not None and not tokens_of_pair:
            raise UserError("--tokens needs data with tokens, in data.block_size; set --pairs")
        needed = fewest * tokens_of_pair
        if self.tokens is not None and self.tokens < needed:
            raise UserError(
                f"--tokens={self.tokens:.4g} is too small for any answer: {fewest} pairs of "
                f"{tokens_of_pair:,} tokens are the fewest; give at least {needed}"
            )

    def refuse_too_few_hours(self, fewest: int, pairs: int, seconds: float) -> None:
        """Raise a `UserError` if `fewest` pairs take too long, as `pairs` of them have shown."""
        if self.hours is None or pairs == 0 or pairs >= fewest:
            return
        needed = fewest * seconds / pairs / HOUR
        if needed > self.hours:
            raise UserError(
                f"--hours={self.hours:g} is too small for any answer: {fewest} pairs, the fewest, "
                f"take {needed:.2g} hours here; give more, and the same command continues"
            )

    def most_pairs(self, tokens_of_pair: int) -> int:
        """Return how many pairs may be trained; `tokens_of_pair` is for all sides."""
        limits = [PAIRS] if self.tokens is None and self.hours is None else []
        if self.pairs is not None:
            limits = [self.pairs]
        if self.tokens is not None:
            limits.append(int(self.tokens // tokens_of_pair))
        return min(limits, default=10**6)

    def has_time(self, pairs: int, seconds: float) -> bool:
        """Return whether another pair fits into the hours, after `pairs` of them in `seconds`."""
        if self.hours is None or pairs == 0:
            return True
        return seconds + seconds / pairs <= self.hours * HOUR
