"""The table of devices and links, with a source for each figure.

FLOP/s are the vendor's dense peaks: where a data sheet prints the doubled figure for 2:4 sparsity,
ours is half of it. Bandwidths are for one direction; data sheets often add up both. Gigabytes are
10^9 bytes, which is no more than what drivers show for each of these devices.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.ranks.peaks import FORMS, PEAKS, in_form
from lockstep.whole_files import write_output

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class Link:
    """The link between two devices or two nodes."""

    name: str
    bandwidth: float  # bytes per second in one direction
    latency: float  # seconds per step of a ring
    source: str
    tree_latency: float | None = None  # seconds per step of a tree; None: as for a ring


# Latencies of a ring and of a tree, from the table that NCCL 2.20 uses to choose its algorithms
# (src/graph/tuning.cc): for protocol LL128, or for Simple over PCIe, which does not have LL128.
_NVLINK, _PCIE, _NETWORK = (1.9e-6, 1.25e-6), (5.7e-6, 28e-6), (4e-6, 8.5e-6)


def _link(name: str, gigabytes: float, latencies: tuple[float, float], source: str) -> Link:
    ring, tree = latencies
    return Link(name, gigabytes * GB, ring, source, tree)


LINKS = {
    link.name: link
    for link in (
        _link("nvlink2", 150, _NVLINK, "NVIDIA V100 data sheet: 300 GB/s both ways"),
        _link("nvlink3", 300, _NVLINK, "NVIDIA A100 data sheet: 600 GB/s both ways"),
        _link("nvlink4", 450, _NVLINK, "NVIDIA H100 data sheet: 900 GB/s both ways"),
        _link("nvlink5", 900, _NVLINK, "NVIDIA DGX B200 data sheet: 1.8 TB/s both ways"),
        _link("pcie3", 15.75, _PCIE, "PCI-SIG 3.0: 8 GT/s x 16 lanes, 128b/130b"),
        _link("pcie4", 31.5, _PCIE, "PCI-SIG 4.0: 16 GT/s x 16 lanes, 128b/130b"),
        _link("pcie5", 63.0, _PCIE, "PCI-SIG 5.0: 32 GT/s x 16 lanes, 128b/130b"),
        _link("edr", 12.5, _NETWORK, "InfiniBand Trade Association roadmap: EDR, 100 Gb/s"),
        _link("hdr", 25, _NETWORK, "InfiniBand Trade Association roadmap: HDR, 200 Gb/s"),
        _link("ndr", 50, _NETWORK, "InfiniBand Trade Association roadmap: NDR, 400 Gb/s"),
        _link("xdr", 100, _NETWORK, "InfiniBand Trade Association roadmap: XDR, 800 Gb/s"),
        _link("1gbe", 0.125, _NETWORK, "IEEE 802.3ab: 1 Gb/s"),
        _link("10gbe", 1.25, _NETWORK, "IEEE 802.3ae: 10 Gb/s"),
        _link("25gbe", 3.125, _NETWORK, "IEEE 802.3by: 25 Gb/s"),
        _link("100gbe", 12.5, _NETWORK, "IEEE 802.3ba: 100 Gb/s"),
        _link("200gbe", 25, _NETWORK, "IEEE 802.3bs: 200 Gb/s"),
        _link("400gbe", 50, _NETWORK, "IEEE 802.3bs: 400 Gb/s"),
    )
}


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and the nodes that contain it.

    Values that no data sheet has are assumed. The output says so; you can set or measure them.
    """

    name: str
    accelerator: str  # cuda or cpu
    peak: dict[str, float]  # dense FLOP/s by number format: fp64, fp32, tf32, fp16, bf16
    memory: float  # bytes
    memory_bandwidth: float  # bytes per second
    host_link: Link  # from the host's memory to the device
    intra: Link  # between the devices of a node
    inter: Link  # between nodes, for one adapter
    adapters: int  # network adapters per node
    devices_per_node: int
    source: str
    # Assumed: the fraction of the dense peak that forward and backward reach (the "model FLOPs
    # utilization" of Chowdhery et al. 2022, appendix B). An H200 reached 0.41 with gpt2_124m.
    utilisation: float = 0.4
    # Assumed: seconds in which the host starts a kernel, of which a layer of GPT-2 has about 70 in
    # forward and backward, in eager mode. Small micro-batches take no less.
    kernel_seconds: float = 3.9e-6
    # Assumed: the fraction of the memory's bandwidth that an update reaches.
    memory_share: float = 0.7
    # Assumed: the fraction of a link's line rate that a collective's payload reaches.
    link_efficiency: float = 0.8
    # Assumed: CUDA's context and kernels, and the buffers of cuBLAS and NCCL.
    context: float = 1.0 * GB  # bytes
    disk: float = 1.0 * GB  # assumed: bytes per second that rank 0 writes, and fsync waits for
    measured: bool = False

    def flops(self, precision: str) -> float:
        """Return the dense peak in FLOP/s of matrix products under `precision`.

        Raises:
            UserError: the device does not support this arithmetic, or its speed is unknown.
        """
        form = FORMS[precision]
        peak = in_form(self.peak, form)
        if peak is None:
            known = ", ".join(self.peak)
            raise UserError(
                f"precision={precision} computes in {form}, but {self.name} is only known for "
                f"{known}; set another precision"
            )
        return peak

    def save(self, path: Path) -> None:
        """Write a profile that `load` can read."""
        write_output(path, json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a profile that `doctor --save-profile` or a person wrote.

        Raises:
            UserError: the file is not a valid profile.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            links = {name: Link(**values[name]) for name in ("host_link", "intra", "inter")}
            return cls(**{**values, **links})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"--hardware {path} is not a profile ({type(error).__name__}: {error}); write one "
                "with doctor --save-profile"
            ) from None


@dataclass(frozen=True)
class _Server:
    """The usual node for a kind of device; `links`: to the host, within a node, between nodes."""

    links: str
    devices: int
    adapters: int
    source: str


_DGX_A100 = _Server("pcie4 nvlink3 hdr", 8, 8, "DGX A100 data sheet")
_DGX_HOPPER = _Server("pcie5 nvlink4 ndr", 8, 8, "DGX H100 and H200 data sheets")
_DGX_B200 = _Server("pcie5 nvlink5 ndr", 8, 8, "DGX B200 data sheet")
_RACK = _Server("pcie4 pcie4 100gbe", 8, 1, "server assumed")
_DESK = _Server("pcie4 pcie4 10gbe", 4, 1, "machine assumed")
_DESK_5 = _Server("pcie5 pcie5 10gbe", 4, 1, "machine assumed")
_CLOUD_3 = _Server("pcie3 pcie3 25gbe", 4, 1, "machine assumed")


def _gpu(
    name: str, device: str, memory: int, bandwidth: int, server: _Server, source: str
) -> Hardware:
    host, intra, inter = (LINKS[link] for link in server.links.split())
    return Hardware(
        name=name,
        accelerator="cuda",
        peak={form: value * TERA for form, value in PEAKS[device].items()},
        memory=memory * GB,
        memory_bandwidth=bandwidth * GB,
        host_link=host,
        intra=intra,
        inter=inter,
        devices_per_node=server.devices,
        adapters=server.adapters,
        source=f"NVIDIA {source}; {server.source}",
    )


# name, CUDA's name, GB, GB/s, usual node, source
HARDWARE = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40", "A100", 40, 1555, _DGX_A100, "A100 data sheet, SXM4 40 GB"),
        _gpu("a100-80", "A100", 80, 2039, _DGX_A100, "A100 data sheet, SXM4 80 GB"),
        _gpu("h100", "H100", 80, 3350, _DGX_HOPPER, "H100 data sheet, SXM, halved for dense"),
        _gpu("h200", "H200", 141, 4800, _DGX_HOPPER, "H200 data sheet, SXM, halved for dense"),
        _gpu("b200", "B200", 180, 8000, _DGX_B200, "Blackwell architecture brief, HGX B200"),
        _gpu("l40s", "L40S", 48, 864, _RACK, "L40S data sheet, without sparsity"),
        _gpu("l4", "L4", 24, 300, _RACK, "L4 data sheet, halved for dense"),
        _gpu("rtx4090", "RTX 4090", 24, 1008, _DESK, "Ada architecture, float32 accumulation"),
        _gpu("rtx5090", "RTX 5090", 32, 1792, _DESK_5, "RTX Blackwell architecture, as rtx4090"),
        _gpu("t4", "T4", 16, 320, _CLOUD_3, "T4 data sheet"),
    )
}


def find_hardware(name: str) -> Hardware:
    """Return the device called `name`, or load the profile in the file `name`.

    Raises:
        UserError: there is neither.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if Path(name).suffix == ".json":
        return Hardware.load(Path(name))
    known = ", ".join(HARDWARE)
    raise UserError(f"--hardware {name} is not one of {known}; or name a profile, FILE.json")


def find_link(name: str, like: Link) -> Link:
    """Return the link called `name`, or one of that many GB/s per direction with `like`'s latency.

    Raises:
        UserError: `name` is neither a known link nor a valid number.
    """
    if name in LINKS:
        return LINKS[name]
    try:
        bandwidth = float(name) * GB
    except ValueError:
        bandwidth = 0.0
    if not 0 < bandwidth < float("inf"):
        raise UserError(f"link {name} is neither GB/s nor one of {', '.join(LINKS)}")
    return replace(like, name=f"{name} GB/s", bandwidth=bandwidth, source="command line")
