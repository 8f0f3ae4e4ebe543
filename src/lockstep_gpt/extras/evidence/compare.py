"""`lockstep-gpt compare`: is a variant better than the base?"""

from __future__ import annotations

import argparse

from lockstep_gpt import PROGRAM
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.evidence.intervals import fewest_pairs
from lockstep_gpt.extras.evidence.measures import measure_of
from lockstep_gpt.extras.evidence.sides import common_seeds, finished_groups
from lockstep_gpt.extras.evidence.verdicts import Judge

CONFIDENCE = 0.95


def main(arguments: list[str]) -> int:
    """Compare groups of finished runs, and print the verdicts."""
    options = _parser().parse_args(arguments)
    if len(options.runs) < 2:
        raise UserError("--runs needs a pattern for the base and one for each variant")
    sides, groups = finished_groups(options.runs)
    seeds = common_seeds(sides, groups)
    judge = Judge(measure_of("val_loss"), 1 - CONFIDENCE, len(sides) - 1)
    fewest = fewest_pairs(judge.alpha)
    if len(seeds) < fewest:
        raise UserError(f"{len(seeds)} common seeds are too few for any verdict; train {fewest}")
    values = [[judge.measure.of(runs[seed]) for seed in seeds] for runs in groups]
    for side, numbers in zip(sides[1:], values[1:], strict=True):
        print(judge.verdict(sides[0].name, side.name, values[0], numbers).text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} compare", description="Judge whether a variant is better than the base."
    )
    parser.add_argument(
        "--runs", nargs="+", metavar="PATTERN", default=[], help="groups of finished runs"
    )
    return parser
