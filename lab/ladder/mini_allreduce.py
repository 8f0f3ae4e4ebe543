"""An all-reduce with plain sockets: through one server, then as a ring; then with gloo.

python lab/ladder/mini_allreduce.py [--ranks 4] [--size 40000] [--timeout 10] [--missing RANK]

Each rank r has [1, 2, 3] x (r + 1), and all ranks get the sum over all ranks. Then they do the
same with a long vector, and its bytes are counted on each connection.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
LOOPBACK = "127.0.0.1"  # other machines cannot connect
HELLO = struct.Struct("<II")  # my rank, and the port where my neighbor finds me
NUMBER = 8  # bytes of a float64


class LostPeer(Exception):  # noqa: N818 (the field's word for it)
    """Another rank did not come, or has ended."""


class Link:
    """A connection to one peer that counts the bytes it carries."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self.peer = peer
        self.carried = 0
        # A small packet must not wait for the acknowledgment of the previous one.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Send all of `data`: `socket.send` may send only part of it."""
        self.carried += len(data)
        try:
            self.connection.sendall(data)
        except OSError as error:
            raise LostPeer(f"rank {self.peer} stopped reading ({error})") from None

    def receive(self, size: int) -> bytes:
        """Receive exactly `size` bytes: TCP is a stream without message boundaries."""
        data = bytearray()
        while len(data) < size:
            try:
                part = self.connection.recv(size - len(data))
            except TimeoutError:
                raise LostPeer(f"rank {self.peer} sent nothing in time") from None
            if not part:
                raise LostPeer(f"rank {self.peer} closed the connection")
            data += part
        self.carried += size
        return bytes(data)

    def send_vector(self, vector: Vector) -> None:
        """Send the numbers as they are in memory; both sides know how many there are."""
        self.send(vector.tobytes())

    def receive_vector(self, length: int) -> Vector:
        """Receive `length` numbers as plain bytes: unlike a pickle, they need no trust."""
        return np.frombuffer(self.receive(length * NUMBER), np.float64)


def meet(
    rank: int, world_size: int, port: int, timeout: float
) -> tuple[dict[int, Link], list[Link]]:
    """Connect to rank 0, which sends all ranks their neighbors' ports; then close the ring.

    Returns:
        Links of the star by peer (all of them on rank 0, only that to rank 0 elsewhere); links of
        the ring, to the rank after this one and from the rank before it.
    """
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(timeout)
        own_port = listener.getsockname()[1]
        if rank == 0:
            star, ports = _gather_ports(own_port, world_size, port, timeout)
        else:
            star = {0: Link(_connect(port, 0, timeout), peer=0)}
            star[0].send(HELLO.pack(rank, own_port))
            ports = list(struct.unpack(f"<{world_size}I", star[0].receive(4 * world_size)))
        after = (rank + 1) % world_size
        before = (rank - 1) % world_size
        forward = _connect(ports[after], after, timeout)
        backward, _ = listener.accept()
    backward.settimeout(timeout)
    return star, [Link(forward, after), Link(backward, before)]


def _gather_ports(
    own_port: int, world_size: int, port: int, timeout: float
) -> tuple[dict[int, Link], list[int]]:
    """Run as the rank that all others know: collect every rank's port, and send all of them."""
    star: dict[int, Link] = {}
    ports = [own_port] * world_size
    with socket.create_server((LOOPBACK, port)) as server:
        while len(star) < world_size - 1:
            missing = set(range(1, world_size)) - set(star)
            link, peer_port = _accept(server, missing, timeout)
            star[link.peer] = link
            ports[link.peer] = peer_port
    for link in star.values():
        link.send(struct.pack(f"<{world_size}I", *ports))
    return star, ports


def _accept(server: socket.socket, missing: set[int], timeout: float) -> tuple[Link, int]:
    server.settimeout(timeout)
    try:
        connection, _ = server.accept()
    except TimeoutError:
        names = ", ".join(map(str, sorted(missing)))
        raise LostPeer(f"rank {names} did not connect within {timeout:g} s") from None
    connection.settimeout(timeout)
    link = Link(connection, peer=-1)
    link.peer, peer_port = HELLO.unpack(link.receive(HELLO.size))
    return link, peer_port


def _connect(port: int, peer: int, timeout: float) -> socket.socket:
    """Connect to a peer that may not be listening yet."""
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((LOOPBACK, port), timeout)
        except OSError:
            if time.monotonic() > end:
                line = f"rank {peer} does not listen at {LOOPBACK}:{port} after {timeout:g} s"
                raise LostPeer(line) from None
            time.sleep(0.02)


def through_server(vector: Vector, star: dict[int, Link]) -> Vector:
    """Sum over all ranks: rank 0 receives every vector, and sends the sum to every rank."""
    if 0 in star:
        star[0].send_vector(vector)
        return star[0].receive_vector(len(vector))
    total = vector.copy()
    for _, link in sorted(star.items()):
        total += link.receive_vector(len(vector))
    for link in star.values():
        link.send_vector(total)
    return total


def around_ring(vector: Vector, rank: int, world_size: int, ring: list[Link]) -> Vector:
    """Sum over all ranks; every rank does a part of the work (Patarasuk and Yuan 2009).

    The vector is cut into as many chunks as there are ranks. Reduce-scatter: in each of N - 1
    steps, a rank passes one chunk on and adds the chunk that it receives to its own; then it has
    one chunk of the sum. All-gather: another N - 1 steps pass the finished chunks around.
    """
    chunks = [chunk.copy() for chunk in np.array_split(vector, world_size)]
    forward, backward = ring
    with ThreadPoolExecutor(1) as sender:  # if all ranks sent first, full buffers would block them
        for step in range(2 * (world_size - 1)):
            out = (rank - step) % world_size
            into = (rank - step - 1) % world_size
            sent = sender.submit(forward.send_vector, chunks[out])
            received = backward.receive_vector(len(chunks[into]))
            chunks[into] = received + chunks[into] if step < world_size - 1 else received
            sent.result()
    return np.concatenate(chunks)


def through_gloo(vectors: list[Vector], options: argparse.Namespace) -> list[Vector]:
    """Do the same with `torch.distributed`, whose ranks meet in a file."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options.meeting}",
        timeout=timedelta(seconds=options.timeout + 60),  # importing torch takes time first
        world_size=options.ranks,
        rank=options.rank,
    )
    tensors = [torch.from_numpy(vector.copy()) for vector in vectors]
    for tensor in tensors:
        dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [tensor.numpy() for tensor in tensors]


def be_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Run as one rank: compute the sum in three ways, and return the results."""
    rank = options.rank
    world_size = options.ranks
    star, ring = meet(rank, world_size, options.port, options.timeout)
    small = np.array([1.0, 2.0, 3.0]) * (rank + 1)
    long = np.arange(options.size, dtype=np.float64) * (rank + 1)
    sums = {"server": through_server(small, star)}
    sums["ring"] = around_ring(small, rank, world_size, ring)
    links = {"server": list(star.values()), "ring": ring[:1]}
    for link in (*star.values(), *ring):
        link.carried = 0
    by_server = through_server(long, star)
    by_ring = around_ring(long, rank, world_size, ring)
    carried = {
        name: {link.peer: link.carried for link in links_of_rank}
        for name, links_of_rank in links.items()
    }
    sums["gloo"], by_gloo = through_gloo([small, long], options)
    equal = bool((by_server == by_gloo).all() and (by_ring == by_gloo).all())
    sum_of_name = {name: total.tolist() for name, total in sums.items()}
    return {"held": small.tolist(), "sums": sum_of_name, "long_equal": equal, "carried": carried}


def start_ranks(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Start each rank as a process, and return what each of them printed."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    place = [f"--port={port}", f"--meeting={folder}/gloo", f"--timeout={options.timeout}"]
    command = [sys.executable, __file__, f"--ranks={options.ranks}", f"--size={options.size}"]
    processes = [
        subprocess.Popen([*command, *place, f"--rank={rank}"], stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
        if rank != options.missing
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(1)  # they have printed the reason
    return [json.loads(output) for output in outputs]


def report(ranks: list[dict[str, Any]], size: int) -> str:
    """Format each rank's values and results, and the long vector's bytes next to the formula."""
    N = len(ranks)
    S = size * NUMBER
    lines = [f"{'rank':4}  {'has':15}  {'by server':15}  {'by ring':15}  by gloo"]
    for rank, result in enumerate(ranks):
        cells = [result["held"], *(result["sums"][name] for name in ("server", "ring", "gloo"))]
        lines.append(f"{rank:4}  " + "  ".join(f"{_numbers(cell):15}" for cell in cells).rstrip())
    same = all(result["long_equal"] for result in ranks)
    lines += ["", f"{size:,} numbers, S = {S:,} bytes, N = {N}; equal to gloo's: {same}"]
    lines.append(f"{'':7} {'link':7} {'carried':>12}   formula")
    star = {int(peer): count for peer, count in ranks[0]["carried"]["server"].items()}
    lines += [_line("server", f"0 - {peer}", star[peer], "2 S", 2 * S) for peer in sorted(star)]
    busiest = sum(star.values())
    lines.append(_line("server", "rank 0", busiest, "2 (N - 1) S", 2 * (N - 1) * S))
    for rank, result in enumerate(ranks):
        for peer, count in result["carried"]["ring"].items():
            formula = 2 * (N - 1) * S // N
            lines.append(_line("ring", f"{rank} -> {peer}", count, "2 (N - 1) / N S", formula))
    return "\n".join(lines)


def _numbers(values: list[float]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values)}]"


def _line(algorithm: str, link: str, carried: int, formula: str, expected: int) -> str:
    return f"{algorithm:7} {link:7} {carried:12,}   {formula} = {expected:,}"


def main() -> None:
    """Read the command line, then run as a rank or start all ranks."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--size", type=int, default=40_000, help="numbers in the long vector")
    flags.add_argument("--timeout", type=float, default=10, help="seconds to wait for a peer")
    flags.add_argument("--missing", type=int, metavar="RANK", help="leave this rank out")
    flags.add_argument("--rank", type=int, help="run as this rank of several started by hand")
    flags.add_argument("--port", type=int, help="with --rank: where rank 0 listens")
    flags.add_argument("--meeting", help="with --rank: the file in which gloo's ranks meet")
    options = flags.parse_args()
    if options.ranks < 2 or options.timeout <= 0 or options.size < 1:
        flags.error("--ranks must be at least 2, --size at least 1, --timeout above 0")
    if options.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            print(report(start_ranks(options, folder), options.size))
        return
    try:
        print(json.dumps(be_rank(options)))
    except LostPeer as error:
        sys.exit(f"rank {options.rank}: {error}")


if __name__ == "__main__":
    main()
