"""Shows a run: a report of it, and its all-reduces, as pages that a browser opens."""

from lockstep_gpt.registry import Command

COMMANDS = {
    "panel": Command(".extras.pages.panel:main", "show a run's all-reduces on an HTML page", False),
    "report": Command(".extras.pages.run_report:main", "report a run, or compare several", False),
}
CALLBACKS = ".extras.pages.environment:callbacks"
