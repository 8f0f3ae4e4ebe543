import pytest

from lockstep_gpt.extras.cluster.collectives import (
    Bandwidth,
    examine_bandwidth,
    slowest,
    table,
)

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
