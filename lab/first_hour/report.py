"""The report of the hour: rows that are on disk as soon as they are known, and report.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

OK = "ok"
FAILED = "FAILED"
CUT_OFF = "cut off"
REFUSED = "refused"  # the project said in one line that it does not support this
SKIPPED = "skipped"
FOLDED_LINES = 30  # of a failure's log
INTRODUCTION = """\
From `lab/first_hour/run.py`. The column *s* has the seconds that a measurement took, with all
starts and compilations. Speeds and times in the results are without these.
"""
OF_DRY_RUN = """\
**A dry run, with tiny shapes on a CPU. It tests the measurements; its figures mean nothing.**
"""
HEAD = "| measurement | result | notes | s |\n|---|---|---|---|\n"


@dataclass
class Row:
    """One line of a stage's table; a measurement has one or more."""

    measurement: str
    name: str
    status: str
    result: str = ""  # figures, or why there are none
    notes: str = ""
    seconds: float = 0.0
    folded: str = ""  # long text below the table: a failure's log, or a list of kernels

    def in_table(self) -> str:
        """Return the row in Markdown."""
        result = self.result
        if self.status == FAILED:
            result = f"**FAILED** {result}"
        elif self.status != OK:
            result = f"{self.status}: {result}"
        cells = (self.name, result, self.notes, f"{self.seconds:.0f}")
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class Report:
    """All rows so far: `results.json` keeps them, and `report.md` shows them.

    Args:
        folder: where both files are; rows of an earlier call stay until they are measured again.
        titles: stage -> its title, in the order of the report.
        facts: about the machine.
        dry: whether no figure means anything.
    """

    def __init__(
        self, folder: Path, titles: dict[str, str], facts: dict[str, str], dry: bool
    ) -> None:
        self.path = folder / "report.md"
        self._results = folder / "results.json"
        self._titles = titles
        self._dry = dry
        self.facts = facts
        self._rows: dict[str, list[Row]] = {stage: [] for stage in titles}
        if self._results.is_file():
            content = json.loads(self._results.read_text("utf-8"))
            for stage, rows in content["rows"].items():
                self._rows[stage] = [Row(**row) for row in rows]
        self.write()

    def rows(self, stage: str) -> list[Row]:
        """Return a stage's rows."""
        return self._rows[stage]

    def drop(self, stage: str, measurement: str) -> None:
        """Forget the rows of a measurement, before it runs again."""
        self._rows[stage] = [row for row in self._rows[stage] if row.measurement != measurement]
        self.write()

    def add(self, stage: str, row: Row) -> None:
        """Add a row, on disk too."""
        self._rows[stage].append(row)
        self.write()

    def write(self) -> None:
        """Write both files; a reader never sees half of one."""
        rows = {stage: [asdict(row) for row in found] for stage, found in self._rows.items()}
        content = {"facts": self.facts, "rows": rows}
        _replace(self._results, json.dumps(content, indent=1) + "\n")
        _replace(self.path, self.text())

    def text(self) -> str:
        """Return the report in Markdown."""
        parts = [f"# The first hour on {self.facts.get('devices', 'this machine')}\n", INTRODUCTION]
        if self._dry:
            parts.append(OF_DRY_RUN)
        facts = "".join(f"| {name} | {fact} |\n" for name, fact in self.facts.items())
        parts.append(f"| fact | |\n|---|---|\n{facts}")
        for stage, title in self._titles.items():
            if self._rows[stage]:
                parts.append(f"## {stage}. {title}\n")
                parts.append(_table(self._rows[stage]))
                parts += [_folded(row) for row in self._rows[stage] if row.folded]
        return "\n".join(parts)


def _table(rows: list[Row]) -> str:
    counts = [f"{len(rows)} rows"]
    for status in (FAILED, CUT_OFF, REFUSED, SKIPPED):
        names = [row.name for row in rows if row.status == status]
        if names:
            counts.append(f"{status}: {', '.join(names)}")
    lines = "".join(f"{row.in_table()}\n" for row in rows)
    return (
        f"{'; '.join(counts)}\n\n| measurement | result | notes | s |\n|---|---|---|---|\n{lines}"
    )


def _folded(row: Row) -> str:
    text = "\n".join(line.rstrip() for line in row.folded.replace("```", "'''").splitlines())
    return f"<details><summary>{row.name}</summary>\n\n```text\n{text}\n```\n\n</details>\n"


def last_lines(log: Path) -> str:
    """Return the end of a log."""
    if not log.is_file():
        return ""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-FOLDED_LINES:])


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(path)
