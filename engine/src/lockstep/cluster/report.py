"""The doctor's report: one line for each check, with the fix, and tables of measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.settings import counted

OK, WARNING, FAILURE = "ok", "warning", "failure"
SEVERITY = (OK, WARNING, FAILURE)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: str
    line: str
    fix: str = ""
    ranks: tuple[int, ...] = ()  # the ranks that it concerns; empty: all of them

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """Return the finding whose `asdict` was sent as JSON."""
        return cls(**{**values, "ranks": tuple(values["ranks"])})

    def as_text(self, width: int) -> str:
        """Return the finding as one line, with the check's name padded to `width`."""
        who = f"{named(self.ranks)}: " if self.ranks else ""
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{self.status:<7}  {self.check:<{width}}  {who}{self.line}{fix}"


def ok(check: str, line: str) -> Finding:
    """Return a finding that nothing is wrong."""
    return Finding(check, OK, line)


def warning(check: str, line: str, fix: str) -> Finding:
    """Return a finding about a problem that costs speed, or that may be intentional."""
    return Finding(check, WARNING, line, fix)


def failure(check: str, line: str, fix: str) -> Finding:
    """Return a finding about a problem that makes training fail or go wrong."""
    return Finding(check, FAILURE, line, fix)


@dataclass
class Report:
    """All findings in order, and the tables that belong to them."""

    world_size: int
    findings: list[Finding] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """The worst status of all findings."""
        return max((finding.status for finding in self.findings), key=SEVERITY.index, default=OK)

    @property
    def exit_status(self) -> int:
        """1 if anything failed, else 0."""
        return int(self.status == FAILURE)

    def as_json(self) -> str:
        """Return everything as a JSON document."""
        return json.dumps({"status": self.status, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        """Format the tables, one line for each finding, and a summary."""
        width = max(len(finding.check) for finding in self.findings)
        tables = ["\n".join([name, *_aligned(rows), ""]) for name, rows in self.tables.items()]
        lines = [finding.as_text(width) for finding in self.findings]
        return "\n".join([*tables, *lines, f"{self._sum()}, {self.seconds:.1f} s"])

    def _sum(self) -> str:
        parts = [counted(self.world_size, "rank")]
        for status in SEVERITY:
            count = sum(finding.status == status for finding in self.findings)
            if count and status == OK:
                parts.append(f"{count} ok")
            elif count:
                parts.append(counted(count, status))
        return ", ".join(parts)


def merged(findings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merge the ranks' own findings, which are given by rank.

    An ok check is listed once. Any other finding is listed once for each line, with the ranks that
    it applies to. A check that is not ok on some rank is not listed as ok.
    """
    ranks: dict[Finding, list[int]] = {}
    for rank, rank_findings in enumerate(findings):
        for finding in rank_findings:
            ranks.setdefault(finding, []).append(rank)
    wrong = {finding.check for finding in ranks if finding.status != OK}
    listed: set[str] = set()
    result = []
    for finding, who in ranks.items():
        if finding.status != OK:
            if len(who) < len(findings):
                finding = replace(finding, ranks=tuple(who))
            result.append(finding)
        elif finding.check not in wrong | listed:
            listed.add(finding.check)
            result.append(finding)
    return result


def named(ranks: Iterable[int]) -> str:
    """Format ranks as `rank 2` or `ranks 0-3, 7`."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []  # the first and the last of successive ranks
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = (str(low) if low == high else f"{low}-{high}" for low, high in runs)
    noun = "ranks" if len(ordered) > 1 else "rank"
    return f"{noun} {', '.join(spans)}"


def _aligned(rows: list[dict[str, Any]]) -> list[str]:
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
