"""The command `panel RUN`: a page that walks through the recorded steps of a run.

It is one file: its style, its scripts, and its data are inside, and it loads nothing else.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from lockstep import project
from lockstep.pages.recordings import as_json, read_recordings
from lockstep.whole_files import write_output

FILES = Path(__file__).with_name("html")
SCRIPTS = ("view.js", "chart.js", "cards.js", "panel.js")
PLACE = re.compile("<!-- (policy|style|script|data) -->")  # in panel.html


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
    return render({"name": run.resolve().name, "recordings": read_recordings(run)})


def render(data: Any) -> str:
    """Return the page with `data` for its scripts; text in them is never read as HTML."""
    style = _text("panel.css")
    script = "\n".join(map(_text, SCRIPTS))
    content = as_json(data).replace("<", "\\u003c")  # can't open or close an element
    parts = {
        "policy": _policy(style, script),
        "style": f"<style>{style}</style>",
        "script": f'<script type="module">{script}</script>',
        "data": f'<script type="application/json" id="data">{content}</script>',
    }
    return PLACE.sub(lambda place: parts[place[1]], _text("panel.html"))


def _text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    """Return the policy that allows only this style and script, by hash, and `data:` images."""
    rule = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rule}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=project.typed("panel"),
        description="Show the all-reduces of a run with callbacks=[default,sync_panel].",
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--output", type=Path, help="the file (default: panel.html in the run)")
    return parser
