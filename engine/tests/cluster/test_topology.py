import pytest

from lockstep.cluster.topology import examine, parse

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  PXB  = Connection traversing multiple PCIe bridges
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def matrix(rows, affinity=True, nics=()):
    """Write the matrix as `nvidia-smi topo -m` does: tabs, an underlined header, a legend."""
    count = len(rows)
    names = [*(f"GPU{gpu}" for gpu in range(count)), *nics]
    head = [*names, *(["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"] if affinity else [])]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in head)]
    for gpu, row in enumerate(rows):
        cells = [f" {cell} " if cell == "X" else cell for cell in row.split()]
        rest = ["SYS"] * len(nics)
        tail = [f"{16 * gpu}-{16 * gpu + 15}", "0", "N/A"] if affinity else []
        lines.append("\t".join([f"GPU{gpu}", *cells, *rest, *tail]))
    lines += ["\t".join([nic, *["SYS"] * count, " X "]) for nic in nics]
    return "\n".join(lines) + "\n" + LEGEND


PAIRS = matrix(["X NV12 PXB PXB", "NV12 X PXB PXB", "PXB PXB X NV12", "PXB PXB NV12 X"])
SWITCH = matrix([" ".join("X" if i == j else "NV18" for j in range(8)) for i in range(8)])
SOCKETS = matrix(
    ["X PHB SYS SYS", "PHB X SYS SYS", "SYS SYS X PHB", "SYS SYS PHB X"], nics=["NIC0"]
)
PLAIN = matrix(["X PIX", "PIX X"], affinity=False)
CUBE = matrix(  # eight V100s: each has six links to four others
    [
        "X NV1 NV1 NV2 NV2 SYS SYS SYS",
        "NV1 X NV2 NV1 SYS NV2 SYS SYS",
        "NV1 NV2 X NV2 SYS SYS NV1 SYS",
        "NV2 NV1 NV2 X SYS SYS SYS NV1",
        "NV2 SYS SYS SYS X NV1 NV1 NV2",
        "SYS NV2 SYS SYS NV1 X NV2 NV1",
        "SYS SYS NV1 SYS NV1 NV2 X NV2",
        "SYS SYS SYS NV1 NV2 NV1 NV2 X",
    ]
)


def test_nvlink_pairs_with_switches_between_are_two_islands():
    four = parse(PAIRS)
    assert (four.path(1, 0), four.path(3, 2), four.path(0, 3)) == ("NV12", "NV12", "PXB")
    assert four.islands() == [(0, 1), (2, 3)]
    assert four.farthest() == "PXB"


def test_nvlink_pairs_suit_tensor_parallel_within_and_data_parallel_between():
    closeness, advice = examine(parse(PAIRS))
    assert "NV12 (NVLink): 0-1 2-3; PXB (several PCIe switches): 0-2 0-3 1-2 1-3" in closeness.line
    assert (advice.status, "{0, 1} {2, 3}" in advice.line) == ("warning", True)
    assert advice.fix == "use tensor parallelism and sharding within 2, data parallelism between"


def test_an_nvlink_switch_suits_all_strategies():
    eight = parse(SWITCH)
    closeness, advice = examine(eight)
    assert closeness.line == "all pairs NV18 (NVLink)"
    assert (advice.status, eight.farthest()) == ("ok", "NV18")


def test_cards_on_two_sockets_are_slow_together():
    four = parse(SOCKETS)
    assert four.farthest() == "SYS"
    assert examine(four)[1].status == "warning"


def test_a_mesh_is_one_island_though_not_all_pairs_are_linked():
    eight = parse(CUBE)
    assert eight.islands() == [tuple(range(8))]
    assert (eight.path(0, 7), eight.farthest()) == ("SYS", "NV1")


def test_a_matrix_without_affinity_is_read_too():
    two = parse(PLAIN)
    assert (two.gpus, two.path(0, 1), two.affinity[0]) == ((0, 1), "PIX", "")
    assert examine(two)[1].status == "ok"


def test_adapters_are_not_counted_as_gpus():
    assert parse(SOCKETS).gpus == (0, 1, 2, 3)
    assert parse(SOCKETS).affinity[1] == "16-31"


def test_blanks_instead_of_tabs_do_not_matter():
    assert parse(PAIRS.expandtabs(8)) == parse(PAIRS)


def test_visible_gpus_have_their_own_topology():
    assert parse(PAIRS).among([1, 0]).islands() == [(0, 1)]
    assert examine(parse(PAIRS).among([2]))[0].line == "one GPU"


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", PAIRS.replace("PXB", "ABC")])
def test_output_without_a_matrix_is_rejected(text):
    with pytest.raises(ValueError, match=r"no matrix|not among NV"):
        parse(text)
