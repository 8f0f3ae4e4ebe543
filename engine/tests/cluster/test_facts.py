from dataclasses import replace

import pytest
import torch

from lockstep.cluster.facts import Facts, collect, compare
from lockstep.ranks.ranks import Ranks

VALUES = {"seed": 1, "launch": {"node_rank": 0}}


def gpu(local_rank, **changes):
    facts = Facts(
        host="node0",
        machine="node0 a",
        local_rank=local_rank,
        world_size=2,
        local_world_size=2,
        device=f"GPU-{local_rank}",
        device_name="NVIDIA H100",
        driver="570.1",
        versions={"torch": "2.13.0"},
        variables={},
        config_hash="1",
    )
    return replace(facts, **changes)


def worst(ranks):
    return {(finding.check, finding.status) for finding in compare(ranks) if finding.status != "ok"}


def test_equal_ranks_on_separate_devices_pass():
    assert worst([gpu(0), gpu(1)]) == set()


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        ({"device": "GPU-0"}, "devices", "failure"),
        ({"versions": {"torch": "2.11.0"}}, "versions", "failure"),
        ({"world_size": 3}, "launcher", "failure"),
        ({"config_hash": "2"}, "configuration", "failure"),
        ({"driver": "550.9"}, "devices", "warning"),
        ({"device_name": "NVIDIA A100"}, "devices", "warning"),
        ({"variables": {"NCCL_ALGO": "Tree"}}, "variables", "warning"),
    ],
)
def test_a_rank_that_differs_is_found(change, check, status):
    ranks = [gpu(0), gpu(1, **change)]
    assert worst(ranks) == {(check, status)}
    (finding,) = [finding for finding in compare(ranks) if finding.status != "ok"]
    assert "rank 1" in finding.line or "ranks 0-1" in finding.line


def test_gpus_of_one_number_on_two_machines_are_two():
    assert (
        worst([gpu(0, machine="a", device="cpu:0"), gpu(0, machine="b", device="cpu:0")]) == set()
    )


def test_a_machine_may_play_several_nodes_for_a_trial():
    ranks = [gpu(0, local_world_size=1, device="cpu:0 of node0") for _ in range(2)]
    assert worst(ranks) == {("devices", "warning")}


def test_machines_may_differ_only_in_their_number():
    first, second, other = (
        collect(Ranks(), "cpu", values).config_hash
        for values in (VALUES, {**VALUES, "launch": {"node_rank": 1}}, {**VALUES, "seed": 2})
    )
    assert first == second != other


@pytest.mark.parametrize(("number", "version"), [(None, None), (91501, "9.15.1")])
def test_cudnn_s_version_is_compared_if_torch_has_it(monkeypatch, number, version):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    facts = collect(Ranks(), "cpu", VALUES)
    assert facts.versions.get("cuDNN") == version
    assert ("cuDNN 9.15.1" in " ".join(finding.line for finding in compare([facts]))) == bool(
        version
    )
