"""What the template gives to Jinja: a check of the answers, and where the template lies.

Cookiecutter and cruft render `cookiecutter.json` and the hooks in the template's own folder, and
run the hooks elsewhere; only here is the folder known for certain.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click  # cookiecutter's own foundation: it prints this exception as one line
from jinja2 import Environment
from jinja2.ext import Extension

from hooks.answers import Refused, checked


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
        click.ClickException: an answer cannot be taken; nothing has been written yet.
    """
    try:
        checked(answers)
    except Refused as refused:
        raise click.ClickException(str(refused)) from None
    return ""
