"""The interface that gloo and NCCL use."""

import os
import sys

import pytest
from torch.distributed import HashStore

from lockstep.errors import UserError
from lockstep.ranks import address, ranks
from lockstep.ranks.ranks import Ranks, choose_interfaces

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def chosen(monkeypatch):
    """Choose interfaces for rank 0 of two on each node, at a host; return gloo's and NCCL's.

    Other ranks have written their addresses to the store, as all do.
    """

    def choose(host, nodes=1, others=("127.0.0.1", "127.0.0.1", "127.0.0.1")):
        store = HashStore()
        for rank, address_of_rank in enumerate(others, 1):
            store.set(f"address of rank {rank}", address_of_rank)
        for name in NAMES:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setenv("MASTER_ADDR", host)
        monkeypatch.setenv("MASTER_PORT", "29500")
        choose_interfaces(Ranks(0, 0, world_size=2 * nodes, local_world_size=2), store)
        return [os.environ.get(name) for name in NAMES]

    return choose


@pytest.mark.skipif(sys.platform != "linux", reason="its names are Linux's")
def test_the_interface_towards_rank_zero_is_chosen(chosen, monkeypatch):
    assert chosen("127.0.0.1") == ["lo", "=lo"]  # NCCL: not what begins with lo
    monkeypatch.setattr(ranks, "address_towards", lambda *_: "192.0.2.7")
    monkeypatch.setattr(ranks, "interface_of", {"192.0.2.7": "lo"}.get)
    assert chosen("another.machine", nodes=2) == ["lo", None]  # NCCL may use several


@pytest.mark.skipif(sys.platform != "linux", reason="its names are Linux's")
def test_a_loopback_address_of_rank_zero_gives_way_to_the_route_to_another_node(
    chosen, monkeypatch
):
    routes = {"this.machine": "127.0.0.1", "192.0.2.8": "192.0.2.7"}
    monkeypatch.setattr(ranks, "address_towards", lambda host, _: routes[host])
    monkeypatch.setattr(ranks, "interface_of", {"192.0.2.7": "lo", "127.0.0.1": "wrong"}.get)
    others = ("127.0.0.1", "192.0.2.8", "192.0.2.8")
    assert chosen("this.machine", nodes=2, others=others) == ["lo", None]


@pytest.mark.skipif(sys.platform != "linux", reason="its names are Linux's")
def test_a_name_that_cannot_be_resolved_means_this_machine_or_nothing(chosen):
    assert chosen("no-such-host.invalid") == ["lo", "=lo"]
    assert chosen("no-such-host.invalid", nodes=2, others=("", "", "")) == [None, None]


@pytest.mark.skipif(sys.platform != "linux", reason="its names are Linux's")
def test_nodes_that_are_all_on_one_machine_use_its_loopback(chosen):
    assert chosen("127.0.0.1", nodes=2) == ["lo", None]


@pytest.mark.parametrize("endpoint", ["n1", "n1:", "n1:port", "n1:0", "n1:99999"])
def test_an_endpoint_without_a_host_or_a_port_is_answered_with_its_form(endpoint):
    line = f"launch.rdzv_endpoint={endpoint} must be HOST:PORT of machine 0, such as n1:29500"
    with pytest.raises(UserError, match=line):
        address.own_address(endpoint)


def test_what_the_user_has_set_stays(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    choose_interfaces(Ranks(0, 0, world_size=2, local_world_size=2), HashStore())
    assert [os.environ[name] for name in NAMES] == ["mine", "mine"]


def test_an_address_of_no_interface_has_no_name(monkeypatch):
    assert address.interface_of("192.0.2.77") == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert address.interface_of("127.0.0.1") == ""
    assert address.loopback_interface() == "lo0"


def test_a_loopback_address_that_is_typed_rehearses_several_machines_on_one():
    assert address.own_address("127.0.0.1:29500")[0] == "127.0.0.1"
    assert address.own_address("localhost:29500")[0] == "127.0.0.1"


def test_a_name_that_means_each_machine_itself_is_rejected_for_several(monkeypatch):
    monkeypatch.setattr(address, "address_towards", lambda *_: "127.0.1.1")
    with pytest.raises(address.UserError, match=r"node0:29500 resolves to 127\.0\.1\.1, which"):
        address.own_address("node0:29500")
