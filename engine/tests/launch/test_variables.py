"""Network interfaces in environment variables, which each rank would refuse only later."""

import socket

import pytest

from lockstep.errors import UserError
from lockstep.launch import variables
from lockstep.launch.placement import Placement

PRESENT = [(1, "lo"), (2, "eth0"), (3, "ib0")]


@pytest.fixture(autouse=True)
def _three_interfaces(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: PRESENT)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def refuse(accelerator="cuda", devices=2):
    variables.refuse_absent_interfaces(Placement(accelerator, devices, 1))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0"),
        ("GLOO_SOCKET_IFNAME", "eth"),  # gloo takes no beginnings
        ("GLOO_SOCKET_IFNAME", "eth0,nosuch0"),
        ("NCCL_SOCKET_IFNAME", "nosuch0"),
        ("NCCL_SOCKET_IFNAME", "=eth"),
    ],
)
def test_an_absent_interface_is_refused_with_those_that_exist(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as error:
        refuse()
    assert str(error.value) == (
        f"{variable}={value} is not a network interface of this machine, which has eth0, ib0, lo; "
        f"set one of them, or: unset {variable}"
    )
    refuse(devices=1)  # connects to nobody


@pytest.mark.parametrize("value", ["eth0", "eth0,ib0", "eth0:1", ""])
def test_gloo_s_own_forms_are_allowed(value, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    refuse()


@pytest.mark.parametrize(
    "value", ["eth", "=eth0", "nosuch,ib", "=nosuch0,ib0", "^docker", "^=nosuch0", "eth0:5000", ""]
)
def test_nccl_s_own_forms_are_allowed(value, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    refuse()


def test_nccl_s_interfaces_do_not_matter_on_cpus(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    refuse("cpu")


def test_the_command_refuses_before_it_creates_the_run(command):
    words = command.smoke("trainer=cpu", "trainer.devices=2", "run_dir=run")
    done = command(*words, status=2, GLOO_SOCKET_IFNAME="nosuch0")
    line = "GLOO_SOCKET_IFNAME=nosuch0 is not a network interface of this machine, which has "
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (command.folder / "run").exists()
