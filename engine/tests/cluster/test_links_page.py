"""The page on strategies has the numbers that `plan` counts with."""

import re
from pathlib import Path

import pytest

from lockstep.plan.hardware import LINKS

PAGE = Path(__file__).parents[2] / "docs/strategies.md"


def test_links_have_the_bandwidths_that_plan_counts_with():
    row = re.compile(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) ms \|$", re.MULTILINE)
    rows = row.findall(PAGE.read_text("utf-8"))
    names = [
        "pcie3",
        "pcie4",
        "pcie5",
        "nvlink2",
        "nvlink3",
        "nvlink4",
        "nvlink5",
        "10gbe",
        "100gbe",
        "ndr",
    ]
    expected = [LINKS[name].bandwidth / 1e9 for name in names]
    assert [float(bandwidth) for bandwidth, _ in rows] == expected
    ring = 2 * 7 / 8 * 4 * 124.4e6 / 1e6  # MB for 8 ranks and float32 gradients of GPT-2
    for (_, milliseconds), bandwidth in zip(rows, expected, strict=True):
        assert float(milliseconds) == pytest.approx(ring / bandwidth, rel=0.03)
