"""Read `nvidia-smi topo -m`: which GPUs are close, which are far, and what suits them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lockstep.cluster.report import Finding, ok, warning

# From the legend of `nvidia-smi topo -m`, the closest first; NV# is a bond of # NVLinks.
PATHS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the PCIe bridge of a CPU",
    "NODE": "the PCIe bridges of a NUMA node",
    "SYS": "the link between CPU sockets",
}
CLOSENESS = tuple(PATHS)
Pair = tuple[int, int]


@dataclass(frozen=True)
class Topology:
    """The GPUs of one machine, and the path between each pair, by their numbers on it."""

    gpus: tuple[int, ...]
    paths: dict[Pair, str]  # (lower, higher) -> NV12, PIX, PXB, PHB, NODE or SYS
    affinity: dict[int, str]  # CPU cores next to each GPU

    def path(self, one: int, other: int) -> str:
        """Return the path between two GPUs."""
        return self.paths[min(one, other), max(one, other)]

    def among(self, gpus: Sequence[int]) -> Topology:
        """Return the topology of only `gpus`."""
        chosen = tuple(sorted(gpus))
        paths = {pair: path for pair, path in self.paths.items() if set(pair) <= set(chosen)}
        return Topology(chosen, paths, {gpu: self.affinity.get(gpu, "") for gpu in chosen})

    def islands(self) -> list[tuple[int, ...]]:
        """Return the groups of GPUs that are connected through NVLink alone."""
        left = set(self.gpus)
        islands = []
        while left:
            island = {min(left)}
            reached = set(island)  # GPUs whose neighbors are still to be found
            while reached:
                reached = {
                    gpu
                    for gpu in left - island
                    if any(kind(self.path(gpu, member)) == "NV" for member in reached)
                }
                island |= reached
            islands.append(tuple(sorted(island)))
            left -= island
        return islands

    def farthest(self) -> str:
        """Return the slowest path that a ring over all GPUs has to use."""
        islands = self.islands()
        if len(islands) == 1:
            return min((path for path in self.paths.values() if kind(path) == "NV"), key=nvlinks)
        between = [
            path
            for (one, other), path in self.paths.items()
            if not any({one, other} <= set(island) for island in islands)
        ]
        return max(between, key=lambda path: CLOSENESS.index(kind(path)))


def kind(path: str) -> str:
    """Return a path's kind in the legend: NV for NV12."""
    return "NV" if path.startswith("NV") else path


def nvlinks(path: str) -> int:
    """Return the number of NVLinks that a path bonds; 0 for other kinds."""
    return int(path[2:]) if kind(path) == "NV" else 0


def parse(text: str) -> Topology:
    """Read the matrix that `nvidia-smi topo -m` prints.

    Raises:
        ValueError: the text contains no full matrix of GPUs, or a path that is not in the legend.
    """
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    header = next((line for line in lines if re.match(r"\s+GPU0\b", line)), "")
    columns = re.findall(r"(\S+)(?=\s|$)", header.split("CPU Affinity")[0])
    gpus: list[int] = []
    paths: dict[Pair, str] = {}
    affinity: dict[int, str] = {}
    for line in lines:
        words = line.split()
        if not words or not re.fullmatch(r"GPU\d+", words[0]) or line == header:
            continue
        gpu = int(words[0][3:])
        gpus.append(gpu)
        affinity[gpu] = _affinity(words[len(columns) + 1 :])
        for column, path in zip(columns, words[1:], strict=False):
            other = int(column[3:]) if re.fullmatch(r"GPU\d+", column) else gpu
            if other > gpu:
                paths[gpu, other] = path
    if not gpus or set(paths) != set(combinations(sorted(gpus), 2)):
        raise ValueError("no matrix of GPUs in the output of nvidia-smi topo -m")
    unknown = {path for path in paths.values() if kind(path) not in PATHS}
    if unknown:
        raise ValueError(f"paths {', '.join(sorted(unknown))} are not among {', '.join(PATHS)}")
    return Topology(tuple(sorted(gpus)), paths, affinity)


def _affinity(words: list[str]) -> str:
    return words[0] if words and re.fullmatch(r"[\d,-]+", words[0]) else ""


def examine(topology: Topology) -> list[Finding]:
    """Report which pairs are close, which are far, and which parallelism suits them."""
    if len(topology.gpus) < 2:
        return [ok("topology", "one GPU")]
    return [_closeness(topology), _advice(topology)]


def _closeness(topology: Topology) -> Finding:
    pairs: dict[str, list[Pair]] = {}
    for pair, path in sorted(topology.paths.items()):
        pairs.setdefault(path, []).append(pair)
    closest = sorted(pairs, key=lambda path: (CLOSENESS.index(kind(path)), -nvlinks(path)))
    parts = [f"{path} ({PATHS[kind(path)]}): {_listed(pairs[path])}" for path in closest]
    if len(closest) == 1:
        return ok("topology", f"all pairs {closest[0]} ({PATHS[kind(closest[0])]})")
    return ok("topology", "; ".join(parts))


def _listed(pairs: list[Pair]) -> str:
    listing = " ".join(f"{one}-{other}" for one, other in pairs[:8])
    if len(pairs) > 8:
        listing += f" and {len(pairs) - 8} more"
    return listing


def _advice(topology: Topology) -> Finding:
    islands, farthest = topology.islands(), kind(topology.farthest())
    if len(islands) == 1:
        return ok("parallelism", "NVLink everywhere: suits ddp, sharding, and tensor parallelism")
    groups = " ".join(f"{{{', '.join(map(str, island))}}}" for island in islands)
    largest = max(map(len, islands))
    if largest > 1:
        return warning(
            "parallelism",
            f"NVLink only within {groups}; between them {farthest} ({PATHS[farthest]}), which "
            "limits an all-reduce over all of them",
            f"use tensor parallelism and sharding within {largest}, data parallelism between",
        )
    if farthest in ("PIX", "PXB"):
        return ok("parallelism", "PCIe switches: ddp is fine, tensor parallelism is slow")
    return warning(
        "parallelism",
        f"GPUs reach each other through {PATHS[farthest]}: ddp is slow for large models",
        "make all-reduces rarer with accumulation, or set strategy.comm_hook=bf16",
    )
