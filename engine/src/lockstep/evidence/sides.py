"""The two or more settings of a comparison: what a side is called, and its runs by seed."""

from __future__ import annotations

import glob
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory

FINISHED = ("done", "stopped early")  # the latter by a callback
Runs = Mapping[int, RunDirectory]  # by seed


@dataclass(frozen=True)
class Side:
    """One setting of a comparison.

    Attributes:
        name: as a sentence contains it, such as `muon lr=0.01`.
        folder: the name of the folder of its runs.
        words: its overrides; none for groups of finished runs.
    """

    name: str
    folder: str
    words: tuple[str, ...] = ()


def sides_of(texts: Sequence[str]) -> list[Side]:
    """Return the sides that texts of overrides describe; the first is the base.

    A name has a choice's value, and a setting's last part: `optim=muon optim.lr=0.01` is called
    `muon lr=0.01`. If two sides would have the same name, they are called as typed.
    """
    words = [_words_of(text) for text in texts]
    names = [" ".join(map(_short, side)) or "base" for side in words]
    if len({*map(_folder_of, names)}) < len(names):
        names = [" ".join(side) or "base" for side in words]
    return [Side(name, _folder_of(name), side) for name, side in zip(names, words, strict=True)]


def _words_of(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:  # an open quotation mark
        raise UserError(f"--variant {text}: {error}; quote words as in a shell") from None


def _short(word: str) -> str:
    name, equals, value = word.partition("=")
    if "." not in name and equals:
        return value
    return f"{name.rpartition('.')[2]}{equals}{value}"


def _folder_of(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-.")


def finished_groups(patterns: Sequence[str]) -> tuple[list[Side], list[dict[int, RunDirectory]]]:
    """Return a side for each pattern of finished runs, and its runs by seed.

    Raises:
        UserError: a pattern matches no run, a run isn't done, or two of a group have one seed.
    """
    groups = [_finished(pattern) for pattern in patterns]
    names = [_last_plain_part(pattern) for pattern in patterns]
    if len({*names}) < len(names):
        names = list(patterns)
    return [Side(name, _folder_of(name)) for name in names], groups


def _last_plain_part(pattern: str) -> str:
    """Return the last folder of a pattern that has no wildcard."""
    plain = [part for part in Path(pattern).parts if not glob.has_magic(part)]
    return plain[-1] if plain else pattern


def _finished(pattern: str) -> dict[int, RunDirectory]:
    runs: dict[int, RunDirectory] = {}
    for path in sorted(glob.glob(pattern)):  # noqa: PTH207 (the pattern may be absolute)
        run = RunDirectory(Path(path))
        if not run.config.is_file():
            continue
        if not is_finished(run):
            raise UserError(f"{path} has not finished; continue it by resume=auto, or leave it out")
        seed = int(run.values()["seed"])
        if seed in runs:
            raise UserError(f"{runs[seed].path} and {path} have seed={seed}; name one of them")
        runs[seed] = run
    if not runs:
        raise UserError(f"--runs {pattern} matches no run; name folders that have a config.yaml")
    return runs


def is_finished(run: RunDirectory) -> bool:
    """Return whether a run has ended as it should."""
    return run.read_summary().get("status") in FINISHED


def common_seeds(sides: Sequence[Side], groups: Sequence[Runs]) -> list[int]:
    """Return the seeds that all groups have, in order, or raise a `UserError` if there are none."""
    seeds = sorted(set.intersection(*({*runs} for runs in groups)))
    if not seeds:
        each = "; ".join(
            f"{side.name} has {', '.join(map(str, sorted(runs)))}"
            for side, runs in zip(sides, groups, strict=True)
        )
        raise UserError(f"no seed is in all groups: {each}; train both sides with the same seeds")
    return seeds
