"""The doctor's measurements, as a profile that `plan --hardware` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from lockstep.cluster.collectives import Bandwidth
from lockstep.cluster.speed import Speed
from lockstep.plan.hardware import LINKS, Hardware, Link
from lockstep.ranks.peaks import FORMS
from lockstep.ranks.ranks import Ranks
from lockstep.settings import counted, precision_of

UNMEASURED = "not measured: assumed"
UNTRIED = "; the utilization is assumed, because no step of the model was timed"


def profile(
    config: DictConfig,
    ranks: Ranks,
    device: torch.device,
    name: str,
    speeds: Sequence[Speed],
    links: Sequence[Bandwidth],
) -> Hardware:
    """Return the hardware as measured; the slowest rank determines each speed.

    Args:
        config: the run's settings; its precision was measured.
        ranks: this process's place.
        device: this rank's device.
        name: name of the kind of device.
        speeds: each rank's speeds.
        links: the slowest measurement of each link; links without one are assumed.
    """
    memory = min(speed.memory for speed in speeds)
    form = FORMS[precision_of(config)] if device.type == "cuda" else "fp32"
    shares = [speed.utilisation for speed in speeds if speed.utilisation]
    utilisation = min(1.0, *shares) if shares else Hardware.utilisation
    link_by_name = {link.link: link for link in links}
    within = _link(link_by_name.get("within a node"), "pcie4")
    between = _link(link_by_name.get("between nodes"), "10gbe", times=ranks.local_world_size)
    return Hardware(
        name=f"{name}, measured",
        accelerator=device.type,
        peak={form: min(speed.compute for speed in speeds)},
        memory=_memory(device, ranks.local_world_size),
        memory_bandwidth=memory,
        host_link=Link("host", min(speed.host for speed in speeds), 0.0, "measured"),
        intra=within,
        inter=between,
        adapters=1,
        devices_per_node=ranks.local_world_size,
        source=f"doctor on {counted(ranks.world_size, 'rank')}{'' if shares else UNTRIED}",
        memory_share=1.0,
        utilisation=utilisation,
        kernel_seconds=0.0 if shares else Hardware.kernel_seconds,  # included in what was measured
        link_efficiency=1.0,
        context=_context(device),
        measured=True,
    )


def _link(measured: Bandwidth | None, otherwise: str, times: int = 1) -> Link:
    """Return a link as measured; `times` ranks of a node measured it at the same time."""
    if measured is None:
        like = LINKS[otherwise]
        return Link(otherwise, like.bandwidth, like.latency, UNMEASURED)
    return Link("measured link", times * measured.best, measured.latency, "measured")


def _memory(device: torch.device, local_world_size: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_world_size


def _context(device: torch.device) -> float:
    """Return the bytes in use outside of torch's allocator; on CPU, all that this process uses."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free - torch.cuda.memory_reserved(device))
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return float(resident * os.sysconf("SC_PAGE_SIZE"))
