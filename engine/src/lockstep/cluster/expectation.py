"""Expected bandwidth of this machine's links in bytes per second, as far as the system knows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster import gpus
from lockstep.cluster.environment import default_interface
from lockstep.cluster.topology import Topology, kind

GB = 1e9
# PCI-SIG: GT/s per lane by generation; 8b/10b before the third, 128b/130b from then on.
TRANSFERS = {1: 2.5 * 0.8, 2: 5 * 0.8, 3: 8 * 128 / 130, 4: 16 * 128 / 130, 5: 32 * 128 / 130}
INFINIBAND, NETWORK = Path("/sys/class/infiniband"), Path("/sys/class/net")


def within(topology: Topology | None, devices: Sequence[int]) -> float | None:
    """Return the expected bandwidth of a ring over this machine's GPUs, in one direction.

    Args:
        topology: the paths between the GPUs.
        devices: torch's device numbers.
    """
    if topology is None or len(topology.gpus) < 2:
        return None
    if kind(topology.farthest()) == "NV":
        return nvlink(gpus.ask("nvlink", "-s", "-i", str(topology.gpus[0])))
    rows = gpus.table("pcie.link.gen.max", "pcie.link.width.max")
    return (
        min((pcie(rows.get(gpus.uuid(device), {})) or 0 for device in devices), default=0) or None
    )


def nvlink(text: str) -> float | None:
    """Add up the rates that `nvidia-smi nvlink -s` lists for one GPU."""
    rates = re.findall(r"Link \d+: ([\d.]+) GB/s", text)
    return sum(map(float, rates)) * GB if rates else None


def pcie(row: dict[str, str]) -> float | None:
    """Return a PCIe link's bandwidth from the generation and lane count in nvidia-smi's row."""
    generation, lanes = (row.get(f"pcie.link.{name}.max", "") for name in ("gen", "width"))
    if not (generation.isdigit() and lanes.isdigit()):
        return None
    rate = TRANSFERS.get(int(generation), max(TRANSFERS.values()))
    return rate * int(lanes) / 8 * GB


def between() -> float | None:
    """Return the expected bandwidth of all network adapters of this machine together.

    It counts active InfiniBand ports if there are any, else the default route's interface.
    """
    rates = [_infiniband(port) for port in sorted(INFINIBAND.glob("*/ports/*"))]
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    return sum(rates) or _ethernet(wanted or default_interface())


def _infiniband(port: Path) -> float:
    try:
        if "ACTIVE" not in (port / "state").read_text():
            return 0.0
        rate = re.match(r"([\d.]+) Gb/sec", (port / "rate").read_text())
    except OSError:
        return 0.0
    return float(rate[1]) / 8 * GB if rate else 0.0


def _ethernet(interface: str) -> float | None:
    try:
        megabits = float((NETWORK / interface / "speed").read_text())
    except (OSError, ValueError):
        return None  # virtual interfaces do not report a speed
    return megabits * 1e6 / 8 if megabits > 0 else None
