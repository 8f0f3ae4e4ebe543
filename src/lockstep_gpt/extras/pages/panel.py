"""`lockstep-gpt panel RUN`: a page that walks through the recorded steps of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep_gpt import PROGRAM
from lockstep_gpt.extras.pages.page import render_page
from lockstep_gpt.extras.pages.recordings import read_recordings
from lockstep_gpt.whole_files import write_output


def main(arguments: list[str]) -> int:
    """Write the page and print its path."""
    options = _parser().parse_args(arguments)
    output = options.output or options.run / "panel.html"
    write_output(output, panel_page(options.run))
    print(f"{output}: open it in any browser; it needs no network")
    return 0


def panel_page(run: Path) -> str:
    """Return the page of the run directory `run`.

    Raises:
        UserError: there is no such run, or none of its steps was recorded.
    """
    return render_page("panel", {"name": run.resolve().name, "recordings": read_recordings(run)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} panel",
        description="Show the all-reduces of a run with callbacks=[default,sync_panel].",
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--output", type=Path, help="the file (default: panel.html in the run)")
    return parser
