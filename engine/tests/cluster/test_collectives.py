from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.cluster import collectives, speed
from lockstep.cluster.collectives import (
    Bandwidth,
    examine_bandwidth,
    examine_results,
    links,
    slowest,
    table,
)
from lockstep.cluster.examination import Examination
from lockstep.ranks.ranks import Ranks

LINK = Bandwidth("within a node", 4, (4096, 10**9), (6e-6, 0.01))


def test_bus_bandwidth_counts_the_bytes_of_a_ring():
    assert LINK.bus(1) == pytest.approx(1.5 * 10**9 / 0.01)
    assert LINK.best == LINK.bus(1)
    assert LINK.latency == pytest.approx(1e-6)


def test_a_link_is_as_fast_as_its_slowest_rank_saw_it():
    other = Bandwidth("within a node", 4, (4096, 10**9), (5e-6, 0.02))
    (link,) = slowest([[LINK], [other]])
    assert link.seconds == (6e-6, 0.02)


@pytest.mark.parametrize(("share", "status"), [(0.9, "ok"), (0.3, "warning")])
def test_a_link_is_compared_with_its_expected_bandwidth(share, status):
    (finding,) = examine_bandwidth([LINK], {"within a node": LINK.best / share})
    assert (finding.check, finding.status) == ("bandwidth", status)


def test_without_an_expected_value_no_link_is_wrong():
    assert examine_bandwidth([LINK], {})[0].status == "ok"


def test_the_table_has_a_row_for_each_size():
    assert [(row["message"], row["ranks"]) for row in table([LINK])] == [
        ("4 KiB", 4),
        ("976,562 KiB", 4),
    ]


CPU = torch.device("cpu")
NAMES = {
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "all_gather": "all-gather",
    "all_to_all_single": "all-to-all",
    "REDUCE_SCATTER": "reduce-scatter",
}


def examined(on_ranks, world):
    def examine(rank):
        return examine_results(Ranks(rank, rank, world, world), CPU)[0]

    return on_ranks(world, examine)


@pytest.mark.parametrize("world", [2, 3])
def test_the_collectives_of_training_are_exact_over_gloo(on_ranks, world):
    for finding in examined(on_ranks, world):
        assert finding.status == "ok"
        assert finding.line == f"{', '.join(NAMES.values())} are exact over gloo"


@pytest.mark.parametrize("name", NAMES)
def test_a_collective_with_a_wrong_result_is_named(on_ranks, monkeypatch, name):
    owner = collectives if name.isupper() else dist
    right = getattr(owner, name)

    def wrong(result, *arguments, **settings):
        right(result, *arguments, **settings)
        (result[0] if isinstance(result, list) else result)[-1] += 1

    monkeypatch.setattr(owner, name, wrong)
    for finding in examined(on_ranks, 2):
        assert finding.status == "failure"
        assert f"{NAMES[name]} gave a wrong result" in finding.line


def test_groups_of_a_node_wait_as_long_as_all_others(on_ranks):
    def waits(rank):
        groups = links(Ranks(rank, rank % 2, 4, 2), 77).values()
        return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]

    assert on_ranks(4, waits) == [[77, 77]] * 4


@pytest.mark.parametrize(("backend", "index"), [("nccl", 1), ("gloo", None)])
def test_ranks_of_a_gpu_join_and_wait_with_their_device(composed, monkeypatch, backend, index):
    given = {}
    monkeypatch.setattr(
        dist, "init_process_group", lambda name, **rest: given.update(rest, name=name)
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "barrier", lambda **rest: given.update(rest))
    monkeypatch.setattr(speed, "measure", lambda *given: given[-1]())  # only waits for the others
    config = composed(f"strategy.process_group_backend={backend}")
    values = {"strategy": {"process_group_backend": backend}}
    ranks = Ranks(1, 1, 2, 2)
    examination = Examination(config, values, ranks, 60, 0.0)
    examination.accelerator = "cuda"
    device = torch.device("cuda", 1)
    vocabulary = "lockstep.cluster.examination.vocabulary"
    monkeypatch.setattr(vocabulary, lambda _: 64)
    with examination._group(SimpleNamespace(store=dist.HashStore()), device):
        examination._speed(device)
    assert given["name"] == backend
    assert given["device_id"] == (device if backend == "nccl" else None)
    assert given["device_ids"] == ([index] if backend == "nccl" else None)
