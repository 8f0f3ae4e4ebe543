#!/usr/bin/env python3
"""Draw docs/architecture.svg: the package's folders as layers, and what they import.

usage: python3 scripts/architecture.py                   draw the picture
       python3 scripts/architecture.py --files [FOLDER]  what each Python file of a folder is

The picture doesn't contain the package's name, or anything of a single extra, so it is the same in
every project. Its counts are rounded down, so that a single new import seldom changes it.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "lockstep_gpt"
PICTURE = ROOT / "docs/architecture.svg"

FLOOR = "floor"  # the package's own files, and all settings
BESIDE = ("inference", "extras")  # drawn beside the top layer, not in the stack
# The layers from the top down: what each is for, and the color of its imports.
ABOUT = {
    "launch": ("from a command line to running ranks", "#ffb35c"),
    "training": ("one rank’s work: assemble, fit, report", "#ff8f8f"),
    "run": ("checkpoints, callbacks, loggers, resuming", "#e29bff"),
    "distributed": ("how ranks meet, and sum their gradients", "#8fb4ff"),
    "data": ("text, tokens, windows, batches", "#62d9d2"),
    "model": ("GPT-2, a modern GPT, their functions", "#8fe08a"),
    FLOOR: ("config, settings, errors, registry", ""),
    "inference": ("generate, evaluate", "#ffe27a"),
    "extras": ("optional features", "#c9d6e3"),
}
OTHER = ("", "#dddddd")  # a folder that you have added

# Lengths in pixels. GitHub shows the picture at its own width.
WIDTH = 880
MARGIN = 24
TOP = 64  # of the highest layer
HEIGHT = 58  # of a layer
GAP = 30  # between layers
TEXT = 18  # from a layer's edge to its text
FIRST_LANE = 352  # the middle of the first folder's lane
LANE = 44  # from one lane to the next
LEFT = {"inference": 568, "extras": 716}  # of the boxes beside the top layer
BOX = 140  # their width
STEPS = (1, 2, 5, 10, 20, 50, 100)  # the counts that the picture shows
LEGEND = "5+: five or more of them; dashed: what extras may import"

STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
.title { font-size: 17px; font-weight: 600; fill: #ffffff; }
.name { font-size: 17px; font-weight: 600; fill: #ffffff; }
.about { font-size: 13px; fill: #c3d7ec; }
.count { font-size: 12px; font-weight: 700; fill: #10263f; text-anchor: middle; }
.layer { fill: #1d446e; stroke: #5f8fbf; }
.floor { fill: #2b5a8c; stroke: #9cc3ea; }
.grid { stroke: #ffffff; stroke-opacity: 0.05; }
"""


def main(arguments: list[str]) -> int:
    """Draw the picture, or list files."""
    parser = argparse.ArgumentParser(prog="architecture.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--files",
        nargs="?",
        const=SOURCE,
        type=Path,
        metavar="FOLDER",
        help="print the first line of each file of a folder, such as data; by default, of all",
    )
    folder = parser.parse_args(arguments).files
    if folder is None:
        PICTURE.write_text(picture(PACKAGE), encoding="utf-8")
        print(PICTURE.relative_to(ROOT).as_posix())
        return 0
    if (PACKAGE / folder).is_dir():  # before a folder of that name here, such as data
        folder = PACKAGE / folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder")
    print("\n".join(lines_about(folder)))
    return 0


def lines_about(folder: Path) -> Iterator[str]:
    """Yield the path and the first line of the docstring of each Python file that isn't empty."""
    contents = {path: path.read_text("utf-8") for path in sorted(folder.rglob("*.py"))}
    names = {path.relative_to(folder).as_posix(): text for path, text in contents.items() if text}
    width = max(map(len, names), default=0)
    for name, text in names.items():
        docstring = ast.get_docstring(ast.parse(text)) or ""
        yield f"{name:<{width}}  {docstring.partition(chr(10))[0]}".rstrip()


def imports(package: Path) -> Counter[tuple[str, str]]:
    """Count a package's imports: (importing layer, imported layer) -> number of modules.

    A module counts once for each file that imports it. Imports within a layer don't count, and
    neither do those of the lowest layer: it is drawn as one piece, on which everything rests.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        importing = layer_of(parts, package)
        if importing == FLOOR:
            continue
        for module in imported_modules(path, package):
            imported = layer_of(module, package)
            if imported != importing:
                counts[importing, imported] += 1
    return counts


def layer_of(parts: tuple[str, ...], package: Path) -> str:
    """Return the layer of a file or module, given as its path in the package."""
    if parts[-1].removesuffix(".py").endswith("_settings") and parts[0] != "extras":
        return FLOOR
    return parts[0] if (package / parts[0]).is_dir() else FLOOR


def imported_modules(path: Path, package: Path) -> set[tuple[str, ...]]:
    """Return the modules of the package that a file imports, each as its path in the package."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            is_folder = package.parent.joinpath(*node.module.split(".")).is_dir()
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner if is_folder else {node.module}
    prefix = f"{package.name}."
    ours = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return {tuple(name.split(".")) for name in ours}


def rounded(count: int) -> int:
    """Return the largest of `STEPS` that a count reaches."""
    return max(step for step in STEPS if step <= count)


def layers_of(package: Path) -> list[str]:
    """Return the layers from the top down; a folder of yours is below `launch`."""
    folders = {path.parent.name for path in package.glob("*/*.py")}
    known = [name for name in ABOUT if name in folders and name not in BESIDE]
    others = sorted(folders - set(ABOUT))
    return [*known[:1], *others, *known[1:], FLOOR]


def picture(package: Path) -> str:
    """Return the picture of a package as SVG.

    Each folder has a lane: a vertical line that goes down from it, with an arrow and a count at
    each layer that the folder imports from.
    """
    layers = layers_of(package)
    beside = [name for name in BESIDE if (package / name).is_dir()]
    counts = imports(package)
    height = top_of(len(layers)) - GAP + MARGIN
    step = min(LANE, 5 * LANE // max(1, len(layers) - 2))
    behind: list[str] = []  # what the layers cover
    front: list[str] = []
    for place, name in enumerate(layers[:-1]):
        x, start = FIRST_LANE + step * place, top_of(place) + HEIGHT // 2
        front.append(f'<circle cx="{x}" cy="{start}" r="6" fill="{color_of(name)}"/>')
        draw_lane(name, x, start, ends_of(name, layers, counts), behind, front)
    for name in beside:
        x, start = LEFT[name] + BOX // 2, TOP + HEIGHT
        draw_lane(name, x, start, ends_of(name, layers, counts), behind, front)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img">',
        "<title>The layers of the package</title>",
        f"<style>\n{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#10263f"/>',
        *grid(height),
        text(MARGIN, 38, "title", "Imports run downward"),
        text(MARGIN + 226, 38, "about", LEGEND),
        *behind,
        *(line for place, name in enumerate(layers) for line in slab(name, place)),
        *(line for name in beside for line in box(name)),
        *front,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def top_of(place: int) -> int:
    """Return the upper edge of the layer at a place in the stack; 0 is the highest."""
    return TOP + place * (HEIGHT + GAP)


def color_of(name: str) -> str:
    """Return the color of a folder's imports."""
    return ABOUT.get(name, OTHER)[1]


def ends_of(name: str, layers: list[str], counts: Counter[tuple[str, str]]) -> dict[int, int]:
    """Return the upper edge of each layer that a folder imports from -> the number of imports.

    Of extras, these are all layers below them, without numbers: each project has other extras.
    """
    if name == "extras":
        return {top_of(place): 0 for place in range(1, len(layers))}
    used = {top_of(place): counts[name, layer] for place, layer in enumerate(layers)}
    return {edge: count for edge, count in used.items() if count}


def draw_lane(
    name: str, x: int, start: int, ends: dict[int, int], behind: list[str], front: list[str]
) -> None:
    """Draw a folder's line from `start` to its last layer, and what is at each of its `ends`."""
    color = color_of(name)
    dashes = ' stroke-dasharray="2 5"' if name == "extras" else ""
    line = (
        f'<path d="M{x} {min([start, *ends])}V{max([start, *ends])}" stroke="{color}"'
        f' stroke-width="2.5" stroke-linecap="round"{dashes}'
    )
    behind.append(f"{line}/>")
    front.append(f'{line} opacity="0.3"/>')  # where it crosses a layer
    for edge, count in ends.items():
        front.append(f'<path d="M{x - 6} {edge - 9}h12l-6 9z" fill="{color}"/>')
        if count:
            front += mark(x, edge + HEIGHT // 2, rounded(count), color)


def mark(x: int, y: int, count: int, color: str) -> list[str]:
    """Draw a count in a circle that grows with it."""
    radius = 10 + 1.6 * STEPS.index(count)
    words = str(count) if count == 1 else f"{count}+"
    return [
        f'<circle cx="{x}" cy="{y}" r="{radius:g}" fill="{color}"/>',
        text(x, y + 4.5, "count", words),
    ]


def slab(name: str, place: int) -> Iterator[str]:
    """Draw a layer of the stack. The top one leaves room for the boxes beside it."""
    y = top_of(place)
    width = LEFT["inference"] - 8 - MARGIN if place == 0 else WIDTH - 2 * MARGIN
    shape = "floor" if name == FLOOR else "layer"
    yield (
        f'<rect class="{shape}" x="{MARGIN}" y="{y}" width="{width}" height="{HEIGHT}" rx="5"'
        ' fill-opacity="0.88"/>'
    )
    yield text(MARGIN + TEXT, y + 25, "name", name)
    yield text(MARGIN + TEXT, y + 45, "about", ABOUT.get(name, OTHER)[0])


def box(name: str) -> Iterator[str]:
    """Draw a folder beside the top layer."""
    x = LEFT[name]
    dashes = ' stroke-dasharray="5 4"' if name == "extras" else ""
    yield (
        f'<rect class="layer" x="{x}" y="{TOP}" width="{BOX}" height="{HEIGHT}" rx="5"{dashes}/>'
    )
    yield text(x + 10, TOP + 25, "name", name)
    yield text(x + 10, TOP + 45, "about", ABOUT[name][0])


def grid(height: int) -> Iterator[str]:
    """Draw the faint lines of drawing paper."""
    across = "".join(f"M0 {y}h{WIDTH}" for y in range(22, height, 22))
    down = "".join(f"M{x} 0v{height}" for x in range(22, WIDTH, 22))
    yield f'<path class="grid" d="{across}{down}"/>'


def text(x: float, y: float, kind: str, words: str) -> str:
    """Return a line of text whose left end, or the middle of a count, is at x."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(words)}</text>'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
