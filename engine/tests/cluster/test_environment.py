import socket

import pytest

from lockstep.cluster import environment
from lockstep.cluster.environment import (
    examine_disks,
    examine_imports,
    examine_launcher,
    examine_names,
    examine_nodes,
    examine_shared_memory,
    examine_tasks,
    examine_variables,
    nearest_folder,
)

GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def statuses(findings):
    return [finding.status for finding in findings]


def test_variables_from_torchrun_pass():
    assert statuses(examine_launcher(GOOD)) == ["ok"]
    assert examine_nodes(4, 2) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two must be a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=0"),
    ],
)
def test_a_wrong_number_of_the_launcher_is_named(change, words):
    (finding,) = examine_launcher(GOOD | change)
    assert (finding.status, words in finding.line) == ("failure", True)


def test_a_missing_variable_is_named():
    (finding,) = examine_launcher({"RANK": "0", "WORLD_SIZE": "1"})
    assert finding.line.endswith("are set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT")


def test_ranks_must_spread_evenly_over_nodes():
    assert "WORLD_SIZE=3 is not a multiple of LOCAL_WORLD_SIZE=2" in examine_nodes(3, 2)[0].line


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE"])
def test_a_task_without_a_rank_is_reported(name):
    assert statuses(examine_tasks({name: "4"})) == ["failure"]
    assert examine_tasks({name: "1"}) == examine_tasks({name: "4", "RANK": "0"}) == []


def test_variables_that_slow_training_down_are_named():
    findings = examine_variables({"NCCL_P2P_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "detail"})
    assert statuses(findings) == ["warning", "warning"]
    assert [finding.fix for finding in findings] == [
        "unset NCCL_P2P_DISABLE",
        "unset TORCH_DISTRIBUTED_DEBUG",
    ]


def test_an_interface_must_exist_by_name_prefix_or_exclusion():
    first = socket.if_nameindex()[0][1]
    for good in (first, first[:1], f"={first}", "^nothing"):
        assert statuses(examine_variables({"NCCL_SOCKET_IFNAME": good})) == ["ok"]
    (finding,) = examine_variables({"GLOO_SOCKET_IFNAME": "nothing0"})
    assert (finding.status, first in finding.line) == ("failure", True)
    assert finding.fix == "set one of them, or: unset GLOO_SOCKET_IFNAME"


def test_an_unresolvable_master_is_reported():
    (finding,) = examine_names({"MASTER_ADDR": "no-such-host.invalid"}, nodes=1)
    assert finding.line == "MASTER_ADDR=no-such-host.invalid cannot be resolved"


def test_a_loopback_name_is_fine_on_one_node(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert statuses(examine_names({"MASTER_ADDR": "localhost"}, nodes=1)) == ["ok"]
    assert statuses(examine_names({"MASTER_ADDR": "localhost"}, nodes=2)) == ["failure"]


def test_an_interface_makes_the_host_s_name_unimportant(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    assert statuses(examine_names(variables, nodes=2)) == ["ok"]


def test_a_full_disk_is_worse_than_a_filling_one(composed, monkeypatch):
    config = composed()
    statuses_of_limits = {}
    for room, status in ((0, "failure"), (10**9, "warning"), (10**12, "ok")):
        some = type("", (), {"free": room, "total": 10**13})
        monkeypatch.setattr(environment.shutil, "disk_usage", lambda _, some=some: some)
        statuses_of_limits[status] = {*statuses(examine_disks(config))}
    assert statuses_of_limits == {status: {status} for status in statuses_of_limits}


@pytest.mark.skipif(not environment.SHARED_MEMORY.is_dir(), reason="no /dev/shm on this system")
def test_shared_memory_needs_room_for_nccl(monkeypatch):
    for room, status in ((2**20, "failure"), (512 * 2**20, "ok")):
        some = type("", (), {"free": room})
        monkeypatch.setattr(environment.shutil, "disk_usage", lambda _, some=some: some)
        assert statuses(examine_shared_memory()) == [status]


def test_the_nearest_existing_folder_is_checked(tmp_path):
    assert nearest_folder(tmp_path / "runs" / "first") == tmp_path


def test_imports_from_a_slow_disk_are_noticed():
    assert examine_imports(4).status == "ok"
    assert examine_imports(200).status == "warning"
