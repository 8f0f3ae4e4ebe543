"""Pages as single files: styles, scripts, and data are inside, and nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from lockstep_gpt.extras.pages.recordings import as_json

PAGES = Path(__file__).with_name("html")
PLACE = re.compile(r"<!-- (policy|style|script|data)((?: [\w.]+)*) -->")


def render_page(name: str, data: Any) -> str:
    """Return `html/NAME.html` with its placeholder comments replaced by what they name.

    Args:
        name: name of the page.
        data: values for its script, in the element `data`; text in them is never read as HTML.
    """
    template = (PAGES / f"{name}.html").read_text(encoding="utf-8")
    named = {kind: files.split() for kind, files in PLACE.findall(template)}
    style, script = (_joined(named[kind]) for kind in ("style", "script"))
    parts = {
        "policy": _policy(style, script),
        "style": f"<style>{style}</style>",
        "script": f'<script type="module">{script}</script>',
        "data": f'<script type="application/json" id="data">{_as_text(data)}</script>',
    }
    return PLACE.sub(lambda place: parts[place[1]], template)


def _joined(names: list[str]) -> str:
    return "\n".join((PAGES / name).read_text(encoding="utf-8") for name in names)


def _as_text(data: Any) -> str:
    """Return JSON that can't open or close an HTML element."""
    return as_json(data).replace("<", "\\u003c")


def _policy(style: str, script: str) -> str:
    """Return the policy that allows only this style and script, by hash, and `data:` images."""
    rule = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src {_hash(style)}; script-src {_hash(script)}"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rule}">'


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
