"""What the template adds to Jinja: a check of the answers, and the template's path.

Cookiecutter renders the hooks in the template's folder and runs them elsewhere, so the path is only
certain here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from jinja2 import Environment
from jinja2.ext import Extension
from rich.prompt import Prompt

from hooks.answers import Refused, check, checked, suggested_package, suggested_slug

QUESTIONS = Path(__file__).parents[1] / "cookiecutter.json"


class TemplateExtension(Extension):
    """Adds what `cookiecutter.json`, the hooks, and the README call to Jinja's globals."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        _need_hooks()  # cookiecutter creates this before it creates a folder
        environment.globals.update(
            check_answer=check_answer,
            check_answers=check_answers,
            keeps_files=lambda: bool(_cookiecutter_s("generate_files", "skip_if_file_exists")),
            suggested_package=suggested_package,
            suggested_slug=suggested_slug,
            template_root=os.getcwd,
        )


def check_answer(answers: dict[str, Any], name: str) -> str:
    """Return an empty text; ask again until the answer to a question is valid.

    Raises:
        SystemExit: it is invalid, and questions are off.
    """
    while name in answers:  # a replay only asks what it doesn't know
        try:
            check(name, answers[name])
            break
        except Refused as refused:
            if _cookiecutter_s("prompt_for_config", "no_input") is not False:
                raise SystemExit(f"Error: {refused}") from None
            print(f"  {refused}")
        answers[name] = _ask_again(name)
    return ""


def _ask_again(name: str) -> str:
    question = json.loads(QUESTIONS.read_text("utf-8"))["__prompts__"][name]
    try:
        return Prompt.ask(f"  {question.splitlines()[0]}", default="", show_default=False)
    except EOFError:
        raise SystemExit(f"Error: {name} has no valid answer") from None


def check_answers(answers: dict[str, Any]) -> str:
    """Return an empty text.

    Raises:
        SystemExit: an answer is invalid; nothing has been written yet. This is the only exception
            that ends cookiecutter with one line.
    """
    try:
        checked(answers)
    except Refused as refused:
        raise SystemExit(f"Error: {refused}") from None
    return ""


def _need_hooks() -> None:
    """Raise SystemExit if cookiecutter is set not to run hooks."""
    for function in ("cookiecutter", "generate_files"):
        if _cookiecutter_s(function, "accept_hooks") is False:
            raise SystemExit(
                "Error: --accept-hooks no leaves nothing: this template's hooks make the project; "
                "read hooks/, then leave that option out"
            )


def _cookiecutter_s(function: str, variable: str) -> Any:
    """Return a variable of a running cookiecutter function; there is no other way to get it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == function and module.startswith("cookiecutter."):
            return frame.f_locals.get(variable)
        frame = frame.f_back
    return None
