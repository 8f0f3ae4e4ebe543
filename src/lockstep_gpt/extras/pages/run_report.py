"""`lockstep-gpt report RUN ...`: a page of one run, or of several side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lockstep_gpt import PROGRAM
from lockstep_gpt.extras.pages.page import render_page
from lockstep_gpt.extras.pages.runs import read_run
from lockstep_gpt.whole_files import write_output


def main(arguments: list[str]) -> int:
    """Write the page and print its path."""
    options = _parser().parse_args(arguments)
    first: Path = options.run[0]
    folder = first if len(options.run) == 1 else first.parent
    output = options.output or folder / "report.html"
    write_output(output, report_page(options.run))
    print(f"{output}: open it in any browser; it needs no network")
    return 0


def report_page(paths: list[Path], **known: Any) -> str:
    """Return the page of one or more runs.

    Args:
        paths: run directories.
        known: values that replace those in the files of the only run, for example its status.

    Raises:
        UserError: one of them isn't a run directory.
    """
    return render_page("report", {"runs": [{**read_run(path), **known} for path in paths]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} report",
        description="Make an HTML report of one or several runs, finished or running.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run directory")
    parser.add_argument(
        "--output",
        type=Path,
        help="the file (default: report.html in the run; for several, next to the first)",
    )
    return parser
