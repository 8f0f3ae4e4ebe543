"""Settings of a run's pages."""

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class PageSettings(ExtraSettings):
    """What a run writes for a browser."""

    node: ClassVar[str] = "pages"
    report: bool = setting("write report.html to the run directory at the end", True)
