"""What the template gives to Jinja: a check of the answers, and where the template lies.

Cookiecutter and cruft render the hooks in the folder of the template and run them elsewhere, so
that only here it is known for certain.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.ext import Extension


class TemplateExtension(Extension):
    """Adds `check_answers`, `template_root` and `under_cruft` to the globals of Jinja."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.globals.update(
            check_answers=check_answers,
            template_root=os.getcwd,
            under_cruft=lambda: "cruft" in sys.modules,
        )


def check_answers(answers: dict[str, Any]) -> str:
    """Return nothing.

    Raises:
        SystemExit: an answer cannot be taken; nothing has been written yet. Of all exceptions,
            only this one ends cookiecutter and cruft alike with one line.
    """
    # Not imported: `cruft update` checks out two states of the template in one process.
    rules = runpy.run_path(str(Path(__file__).with_name("answers.py")))
    try:
        rules["checked"](answers)
    except rules["Refused"] as refused:
        raise SystemExit(f"Error: {refused}") from None
    return ""
