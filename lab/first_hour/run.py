#!/usr/bin/env python3
"""Have a GPU for an hour? This measures, on it, what matters most about this project.

usage: python lab/first_hour/run.py [STAGE ...] [--out FOLDER] [--only TEXT] [--nanogpt FOLDER]
           [--seconds N] [--dry]
       python lab/first_hour/run.py prepare [--folder FOLDER] [--has NAME,...]

Stages: A parts of a step; B works; C tests; D speed; E comparison; F strategies; G sizes; H, I
several GPUs. Without a stage, all run. The report is FOLDER/report.md, complete after each row;
another call replaces only what it measures. `prepare` copies the packages that a GPU's machine
without a network may lack. The README in this folder says more. Exit status 1: something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import comparison
import hard_cases
import one_process
import preparation
import several_gpus
import speed
import works
from measuring import ROOT, Hour, Stage, program
from report import FAILED, Report

STAGES: dict[str, one_process.OneProcess | Stage] = {
    stage.letter: stage
    for stage in (
        one_process.STAGE,
        works.WORKS,
        works.TESTED,
        speed.STAGE,
        comparison.STAGE,
        hard_cases.STRATEGIES,
        hard_cases.SIZES,
        several_gpus.WORKS,
        several_gpus.SPEED,
    )
}
DRY_RANKS = 2


def main() -> int:
    """Run the stages that the command line names, and return the exit status."""
    if sys.argv[1:2] == [preparation.WORD]:
        return preparation.main(sys.argv[2:])
    options = parse_options()
    if importlib.util.find_spec("lockstep_gpt") is None:
        refuse(f"{sys.executable} lacks lockstep_gpt; use the project's environment")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    titles = {letter: stage.title for letter, stage in STAGES.items()}
    facts, devices = describe_machine(options.dry)
    report = Report(out, titles, facts, options.dry)
    hour = Hour(out, report, options.dry, devices, options.nanogpt, options.seconds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends our processes, too
    interrupted = False
    try:
        for letter in options.stages or STAGES:
            STAGES[letter].run(hour, options.only)
    except KeyboardInterrupt:  # the report so far is complete
        interrupted = True
    print(f"\nthe report: {report.path}")
    if interrupted:
        return 128 + signal.SIGINT
    rows = [row for letter in STAGES for row in report.rows(letter)]
    return int(any(row.status == FAILED for row in rows))


def parse_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"{', '.join(STAGES)}; all by default"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs/first_hour", help="a folder")
    parser.add_argument("--only", default="", help="only measurements whose names contain this")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, to compare with")
    parser.add_argument("--seconds", type=float, help="limit of each stage, instead of its own")
    parser.add_argument("--dry", action="store_true", help="tiny shapes on a CPU: tests all this")
    options = parser.parse_args()
    for letter in options.stages:
        if letter not in STAGES:
            parser.error(f"there is no stage {letter}; there are {', '.join(STAGES)}")
    if options.nanogpt:
        options.nanogpt = options.nanogpt.resolve()
    return options


def describe_machine(dry: bool) -> tuple[dict[str, str], int]:
    """Return what all figures depend on, and how many devices there are."""
    output = subprocess.check_output(program("machine"), text=True, cwd=ROOT)
    facts = json.loads(output.splitlines()[-1])
    gpus = facts.pop("count")
    if dry:
        return facts, DRY_RANKS
    if not gpus:
        refuse("torch finds no GPU; --dry tests the measurements on a CPU")
    return facts, gpus


def refuse(line: str) -> NoReturn:
    """Print why this cannot be done, and exit with status 2."""
    sys.stderr.write(f"run.py: {line}\n")
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
