"""Orders in which the gradients of a step can be added: the error of each, and a picture.

python lab/ladder/sums.py [--chart FILE]

Floating point rounds each addition, so the order determines the last digits.
"""

from __future__ import annotations

import argparse
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Wedge
from PIL import Image
from torch import Tensor

Sum = Callable[[list[Any]], Any]  # of numbers, tensors, or nodes of the picture
LEAVES, RANKS = 8, (1, 2, 4)  # in the picture
SUMS = 10_000  # per order, to measure its error
RING = 8  # ranks of the ring in the table
COLORS = ("#1b6ca8", "#e08a1e", "#2f9268", "#a8487f")  # for ranks 0 to 3
LINE, WORDS = "#9aa3ab", "#3c4650"


def one_by_one(parts: list[Any]) -> Any:
    """Add from the first to the last, as gradients are accumulated."""
    return functools.reduce(operator.add, parts)


def pairwise(parts: list[Any]) -> Any:
    """Add neighbors, then neighboring sums; the number of parts must be a power of two."""
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def by_ranks(add: Sum, parts: list[Any], ranks: int) -> Any:
    """Add each rank's block, then the ranks' sums: as in a ring if `add` is `one_by_one`."""
    share = len(parts) // ranks
    return add([add(parts[first : first + share]) for first in range(0, len(parts), share)])


def errors(leaves: int) -> list[float]:
    """Return the root mean square error of sums of `leaves` numbers: one by one, ring, tree."""
    generator = torch.Generator().manual_seed(leaves)
    parts = [torch.randn(SUMS, generator=generator) for _ in range(leaves)]
    exact = one_by_one([part.double() for part in parts])

    def error(total: Tensor) -> float:
        return float((total.double() - exact).square().mean().sqrt())

    sums = (one_by_one(parts), by_ranks(one_by_one, parts, RING), pairwise(parts))
    return [error(total) for total in sums]


@dataclass(frozen=True)
class Node:
    """A node of the picture: a micro-batch's gradient, or a sum."""

    ranks: tuple[int, ...]  # the ranks that compute it; several ranks compute a slice each
    world_size: int
    x: float  # for a micro-batch, its number
    height: int = 0
    below: tuple[Node, ...] = ()
    slant: bool = False  # sums are above their last part, not above the middle

    def __add__(self, other: Node) -> Node:
        alone = self.ranks == other.ranks and len(self.ranks) == 1
        ranks = self.ranks if alone else tuple(range(self.world_size))
        x = other.x if self.slant else (self.x + other.x) / 2
        height = 1 + max(self.height, other.height)
        return Node(ranks, self.world_size, x, height, (self, other), self.slant)


def draw(path: Path) -> None:
    """Draw sums of 8 gradients on 1, 2, and 4 ranks: one by one, and pairwise."""
    figure = Figure(figsize=(10.5, 6), layout="constrained")
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(7.4, 6))
    _draw_row(upper, "One by one: each number of ranks adds in another order", one_by_one, 5)
    _draw_row(lower, "Pairwise: one tree, whoever adds", pairwise, 3.6)
    figure.savefig(path, format="png", dpi=130)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(64)
    few.save(path, optimize=True)


def _draw_row(figure: SubFigure, title: str, add: Sum, height: float) -> None:
    figure.suptitle(title, fontsize=12, color=WORDS, x=0.012, ha="left", weight="bold")
    for axes, ranks in zip(figure.subplots(1, len(RANKS)), RANKS, strict=True):
        share = LEAVES // ranks
        slant = add is one_by_one
        leaves = [Node((leaf // share,), ranks, leaf, slant=slant) for leaf in range(LEAVES)]
        top = by_ranks(add, leaves, ranks)
        _draw_node(axes, top, height / top.height)
        for rank in range(ranks):
            first = share * rank - 0.38
            color = COLORS[rank]
            axes.plot([first, first + share - 0.24], [-0.66] * 2, color=color, lw=3)
            middle = first + share / 2 - 0.12
            label = {"ha": "center", "va": "top", "fontsize": 9.5}
            axes.text(middle, -0.82, f"rank {rank}", label, color=color)
        axes.set(xlim=(-0.6, LEAVES - 0.4), ylim=(-1.4, height + 0.4), aspect="equal")
        axes.set_axis_off()


def _draw_node(axes: Axes, node: Node, step: float) -> None:
    """Draw a sum above its parts, with a wedge for each rank that adds a slice of it."""
    y = step * node.height
    for part in node.below:
        axes.plot([node.x, part.x], [y, step * part.height], color=LINE, lw=1.4, zorder=1)
        _draw_node(axes, part, step)
    turn = 360 / len(node.ranks)
    for number, rank in enumerate(node.ranks):
        start = 90 + turn * number
        wedge = Wedge((node.x, y), 0.36, start, start + turn, color=COLORS[rank], lw=0, zorder=2)
        axes.add_patch(wedge)
    sign = "+" if node.below else f"{node.x:g}"
    style = {"color": "white", "weight": "bold", "ha": "center", "va": "center_baseline"}
    axes.text(node.x, y - 0.02, sign, style, fontsize=10, zorder=3)


def main() -> None:
    """Print the table, and draw the picture."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--chart", type=Path, default=Path("runs/sums.png"))
    options = flags.parse_args()
    print("root mean square error of sums of K random numbers, float32")
    print(f"{'K':>4}  one by one  ring of {RING}  pairwise")
    for leaves in (8, 64, 512):
        alone, ring, tree = errors(leaves)
        print(f"{leaves:4}  {alone:10.1e}  {ring:9.1e}  {tree:8.1e}")
    options.chart.parent.mkdir(parents=True, exist_ok=True)
    draw(options.chart)
    print(f"chart: {options.chart}")


if __name__ == "__main__":
    main()
