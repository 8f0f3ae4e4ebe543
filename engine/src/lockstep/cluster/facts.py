"""Facts about a rank: its host, device, and versions. Rank 0 compares them."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lockstep import project
from lockstep.cluster import gpus
from lockstep.cluster.report import Finding, failure, named, ok, warning
from lockstep.ranks.ranks import Ranks
from lockstep.settings import counted, node_of

PACKAGES = ("torch", "lightning", "numpy", "hydra-core", "omegaconf")
SHARED_VARIABLES = re.compile("NCCL_|TORCH_NCCL_|GLOO_(?!SOCKET_IFNAME)")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Facts:
    """Facts about one rank, as plain values that can be sent as JSON."""

    host: str
    machine: str  # differs between machines of the same name
    local_rank: int
    world_size: int
    local_world_size: int
    device: str  # must differ between the ranks of a machine
    device_name: str
    driver: str
    versions: dict[str, str]
    variables: dict[str, str]
    config_hash: str

    @property
    def nodes(self) -> int:
        """Number of machines, according to the launcher."""
        return self.world_size // self.local_world_size


def collect(ranks: Ranks, accelerator: str, values: dict[str, Any]) -> Facts:
    """Collect this rank's facts.

    Args:
        ranks: this process's place.
        accelerator: cuda or cpu.
        values: the configuration as this rank composed it.
    """
    host = socket.gethostname()
    machine = f"{host} {BOOT_ID.read_text().strip() if BOOT_ID.exists() else ''}"
    gpu = accelerator == "cuda" and gpus.identity(ranks.local_rank)
    device, name, driver = gpu or (f"cpu:{ranks.local_rank} of {host}", platform.machine(), "")
    return Facts(
        host=host,
        machine=machine,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        device=device,
        device_name=name,
        driver=driver,
        versions={
            "python": platform.python_version(),
            **dict(map(_version, PACKAGES)),
            **_libraries(),
            "our code": _fingerprint(),
        },
        variables={k: v for k, v in sorted(os.environ.items()) if SHARED_VARIABLES.match(k)},
        config_hash=_hash(values),
    )


def _hash(values: dict[str, Any]) -> str:
    """Return a SHA-256 of the configuration without `launch.node_rank`, which may differ."""
    launch = {**node_of(values, "launch"), "node_rank": None}
    return hashlib.sha256(json.dumps({**values, "launch": launch}).encode()).hexdigest()


def _version(package: str) -> tuple[str, str]:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "not installed"


def _libraries() -> dict[str, str]:
    """Return the version of cuDNN, if torch has it: attention on a GPU depends on it."""
    cudnn: Any = torch.backends.cudnn
    number = cudnn.version()
    if number is None:
        return {}
    thousands = 10_000 if number >= 90_000 else 1000  # of the major version, from 9 on
    return {"cuDNN": f"{number // thousands}.{number % thousands // 100}.{number % 100}"}


def _fingerprint() -> str:
    """Return 8 hex digits that change with any of our source files."""
    packages = ["lockstep", project.package()]
    modules = [importlib.import_module(name) for name in packages if name is not None]
    folders = [Path(module.__path__[0]) for module in modules]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    content = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:8]


def compare(ranks: Sequence[Facts]) -> list[Finding]:
    """Report the differences between the ranks that should not exist."""
    return [
        *_launcher(ranks),
        *_versions(ranks),
        *_configurations(ranks),
        *_devices(ranks),
        *_variables(ranks),
    ]


def _grouped(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return value -> the ranks that have it, from each rank's value."""
    groups = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    return groups


def _values_by_ranks(groups: dict[Any, list[int]]) -> str:
    return ", ".join(f"{value or 'nothing'} on {named(who)}" for value, who in groups.items())


def _launcher(ranks: Sequence[Facts]) -> list[Finding]:
    findings = []
    for name in ("world_size", "local_world_size"):
        groups = _grouped(getattr(facts, name) for facts in ranks)
        if len(groups) > 1:
            line = f"{name.upper()} is {_values_by_ranks(groups)}"
            findings.append(failure("launcher", line, f"give all ranks the same {name.upper()}"))
    return findings


def _versions(ranks: Sequence[Facts]) -> list[Finding]:
    findings = []
    for package in ranks[0].versions:
        groups = _grouped(facts.versions[package] for facts in ranks)
        if len(groups) > 1:
            fix = "install the same on all nodes, from one constraints.txt"
            findings.append(failure("versions", f"{package} is {_values_by_ranks(groups)}", fix))
    everything = ", ".join(f"{name} {number}" for name, number in ranks[0].versions.items())
    return findings or [ok("versions", everything)]


def _configurations(ranks: Sequence[Facts]) -> list[Finding]:
    first = ranks[0].config_hash
    others = [rank for rank, facts in enumerate(ranks) if facts.config_hash != first]
    if not others:
        return [ok("configuration", "all ranks composed the same")]
    line = f"{named(others)} composed a different configuration than rank 0"
    return [failure("configuration", line, "give all ranks the same command line and YAML files")]


def _devices(ranks: Sequence[Facts]) -> list[Finding]:
    findings = []
    groups = _grouped((facts.machine, facts.device) for facts in ranks)
    for (_, device), who in groups.items():
        if len(who) > 1:
            findings.append(_shared(ranks[who[0]], device, who))
    for name in ("device_name", "driver"):
        groups = _grouped(getattr(facts, name) for facts in ranks)
        if len(groups) > 1:
            fix = "the slowest sets the pace: leave it out, or fix it"
            findings.append(warning("devices", f"{name} is {_values_by_ranks(groups)}", fix))
    hosts = len({facts.machine for facts in ranks})
    line = f"{len(ranks)} x {ranks[0].device_name} on {counted(hosts, 'machine')}"
    return findings or [ok("devices", line)]


def _shared(facts: Facts, device: str, who: list[int]) -> Finding:
    line = f"{named(who)} of {facts.host} share one device, {device}"
    if device.startswith("cpu") and facts.local_world_size == 1:
        fix = "fine for a trial; else set LOCAL_WORLD_SIZE to the ranks of this machine"
        return warning("devices", f"{named(who)} count as nodes but share one machine", fix)
    fix = "give each rank of a machine its own LOCAL_RANK, and the same CUDA_VISIBLE_DEVICES"
    return failure("devices", line, fix)


def _variables(ranks: Sequence[Facts]) -> list[Finding]:
    names = sorted({name for facts in ranks for name in facts.variables})
    findings = []
    for variable in names:
        groups = _grouped(facts.variables.get(variable, "") for facts in ranks)
        if len(groups) > 1:
            line = f"{variable} is {_values_by_ranks(groups)}"
            findings.append(warning("variables", line, "export the same value everywhere"))
    return findings
