"""The address and the network interface at which other machines reach this one."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys

from lockstep.errors import UserError
from lockstep.settings import check

LOOPBACK = "127.0.0.1"  # this machine; the name localhost may have no such address
PATIENCE = 2.0  # seconds for a connection that does not leave the machine
SIOCGIFADDR = 0x8915  # ioctl(2) request for the address of an interface


def own_address(endpoint: str) -> tuple[str, str]:
    """Return this machine's address as seen from `endpoint`, HOST:PORT, and its interface.

    A loopback address rehearses several machines on one. A name must not turn out to be one: some
    systems, such as Debian, resolve a machine's own name like that.

    Raises:
        UserError: the endpoint is not an address or cannot be resolved, or its name means this
            machine on every machine.
    """
    host, _, port = endpoint.rpartition(":")
    has_both = host and port.isdecimal() and 0 < int(port) < 65_536
    rule = f"must be HOST:PORT of machine 0, such as {host or endpoint}:29500"
    check("launch.rdzv_endpoint", endpoint, bool(has_both), rule)
    try:
        address = address_towards(host, int(port))
    except OSError as error:
        raise UserError(
            f"launch.rdzv_endpoint={endpoint} cannot be reached ({error}); give a HOST:PORT of "
            "machine 0 that this machine can resolve"
        ) from None
    if is_loopback(address) and not is_rehearsal(endpoint):
        raise UserError(
            f"launch.rdzv_endpoint={endpoint} resolves to {address}, which other machines can't "
            "reach; give machine 0's network address"
        )
    return address, interface_of(address)


def is_rehearsal(endpoint: str) -> bool:
    """Return whether HOST:PORT says that all machines are this one."""
    host = endpoint.rpartition(":")[0]
    return host == "localhost" or is_loopback(host)


def address_towards(host: str, port: int) -> str:
    """Return the address from which this machine would send to `host`; raise an `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def refuse_no_loopback() -> None:
    """Raise a `UserError` if processes of this machine can't connect to each other."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), PATIENCE).close()
    except OSError as error:
        raise UserError(
            f"the ranks of this machine can't connect to {LOOPBACK} ({error.strerror or error}); "
            "switch its loopback interface on: ip link set lo up"
        ) from None


def is_loopback(address: str) -> bool:
    """Return whether an IPv4 `address` means this machine on every machine."""
    return address.startswith("127.")


def interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 `address`; empty if none has it."""
    if sys.platform != "linux":
        return ""
    for _, name in socket.if_nameindex():
        if _has(name, address):
            return name
    return ""


def loopback_interface() -> str:
    """Return the name of the interface that stays on this machine."""
    return "lo0" if sys.platform == "darwin" else "lo"


def _has(interface: str, address: str) -> bool:
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:  # the interface does not have one
            return False
    return socket.inet_ntoa(answer[20:24]) == address
