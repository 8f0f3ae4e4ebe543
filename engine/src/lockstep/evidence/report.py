"""The result of a comparison: on the terminal, as JSON, and as a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.evidence import fairness
from lockstep.evidence.comparison import Comparison
from lockstep.evidence.fairness import Setting
from lockstep.evidence.page import page_of
from lockstep.evidence.sides import Runs, Side
from lockstep.evidence.verdicts import Judge
from lockstep.whole_files import replace_text

RESULT = "compare.json"
PAGE = "compare.html"


@dataclass
class Report:
    """All measures of a comparison, and what to say about them.

    Attributes:
        judges: one for each measure; the first decides when the comparison ends.
        sides: the base and the variants.
        warnings: what makes the comparison unfair.
        comparisons: one for each judge, of the runs so far.
    """

    judges: list[Judge]
    sides: list[Side]
    warnings: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def check(self, settings: Sequence[Setting]) -> None:
        """Refuse sides that train the same, and collect what makes them unfair."""
        fairness.refuse_equal(settings)
        self.warnings += fairness.warnings(settings)

    def refuse_other_data(self, settings: Sequence[Setting]) -> None:
        """Raise a `UserError` if sides would train with other data, before they do."""
        for judge in self.judges:
            fairness.refuse_other_data(settings, judge.measure)

    def update(self, groups: Sequence[Runs]) -> Comparison:
        """Read the finished runs; return the comparison of the first measure.

        Raises:
            UserError: their data can't be compared.
        """
        for judge in self.judges:
            fairness.refuse_other_tokens(groups, judge.measure)
        self.comparisons = [Comparison.of_runs(judge, self.sides, groups) for judge in self.judges]
        return self.comparisons[0]

    def warn_of_time(self, groups: Sequence[Runs]) -> None:
        """Also warn if a side needs much more time for the same tokens."""
        names = [side.name for side in self.sides]
        self.warnings += fairness.warnings_of_time(names, groups)

    def progress(self) -> str:
        """Return the verdicts of the first measure on the variants that have the newest pair."""
        verdicts = self.comparisons[0].verdicts().values()
        pairs = max(verdict.interval.pairs for verdict in verdicts)
        return "\n".join(verdict.text for verdict in verdicts if verdict.interval.pairs == pairs)

    def as_values(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON and the page."""
        comparisons = [comparison.as_values() for comparison in self.comparisons]
        return {"warnings": self.warnings, "comparisons": comparisons}

    def write(self, folder: Path, **more: Any) -> None:
        """Write the result as JSON, and as a page."""
        values = {**self.as_values(), **more}
        replace_text(folder / RESULT, json.dumps(values, indent=1) + "\n")
        replace_text(folder / PAGE, page_of(values))

    def print(self) -> None:
        """Print the table of each measure, the warnings, and the verdicts."""
        for comparison in self.comparisons:
            print(f"\n{comparison.judge.measure.name}\n{comparison.table()}")
        print()
        for warning in self.warnings:
            print(f"unfair? {warning}")
        for comparison in self.comparisons:
            print(*(verdict.text for verdict in comparison.verdicts().values()), sep="\n")
