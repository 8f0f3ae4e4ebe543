import os
import stat

import pytest
import torch

from lockstep.cluster import expectation, gpus
from lockstep.cluster.expectation import nvlink, pcie

NVLINK = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
\t Link 2: <inactive>
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a program of that name, which prints a recorded text, first on the path."""

    def record(text, status=0):
        program = tmp_path / "nvidia-smi"
        (tmp_path / "text").write_text(text)
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/text\nexit {status}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return record


def test_gpus_are_distinguished_by_uuid(nvidia_smi):
    nvidia_smi("GPU-1, 570.86, 10\nGPU-2, 570.86, 81559\n")
    assert gpus.table("driver_version", "memory.used")["GPU-2"]["memory.used"] == "81559"


def test_a_failing_driver_gives_no_finding(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate", status=9)
    assert gpus.ask("topo", "-m") == ""
    assert gpus.table("driver_version") == {}


def test_the_nvlinks_of_a_gpu_add_up():
    assert nvlink(NVLINK) == 50e9
    assert nvlink("") is None


def test_pcie_bandwidth_follows_from_generation_and_lanes():
    row = {"pcie.link.gen.max": "4", "pcie.link.width.max": "16"}
    assert pcie(row) == pytest.approx(31.5e9, rel=0.001)
    assert pcie({"pcie.link.gen.max": "[N/A]"}) is None


def test_network_adapters_add_up(tmp_path, monkeypatch):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    monkeypatch.setattr(expectation, "INFINIBAND", tmp_path)
    assert expectation.between() == 2 * 50e9


def test_cores_that_are_too_few_for_all_threads_are_noticed():
    cores = len(os.sched_getaffinity(0))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        findings = [gpus.examine_device(0, ranks, "cpu")[0] for ranks in (cores, cores + 1)]
    finally:
        torch.set_num_threads(before)
    assert [finding.status for finding in findings] == ["ok", "warning"]
    assert findings[1].fix == "export OMP_NUM_THREADS=1"


@pytest.mark.gpu
def test_a_rank_without_its_own_gpu_is_reported():
    (finding,) = gpus.examine_device(torch.cuda.device_count(), 1, "cuda")
    assert (finding.status, "sees" in finding.line) == ("failure", True)
    assert gpus.identity(0)[0].startswith(("GPU-", "MIG-"))
