"""Several machines, simulated as network namespaces: one run, also when a link fails."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"
)


# A program on one of the machines, as with `ip netns exec`, but without a separate process.
INSIDE = """
import ctypes, os, socket
import lockstep_gpt
from lockstep import commands as cli
NET, MOUNTS, NAMES = 0x40000000, 0x20000, 0x04000000  # CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS
PRIVATE, BIND = 0x44000, 0x1000  # MS_REC | MS_PRIVATE, MS_BIND
library = ctypes.CDLL(None, use_errno=True)
def call(function, *words):
    if getattr(library, function)(*words):
        raise OSError(ctypes.get_errno(), function)
def main(words):
    with open(os.environ["NAMESPACE"]) as namespace:
        call("setns", namespace.fileno(), NET)
    return cli.main(words)
def apart(words):
    # Also with a memory of its own.
    call("unshare", MOUNTS)
    call("mount", b"none", b"/", None, PRIVATE, None)
    call("mount", b"none", b"/dev/shm", b"tmpfs", 0, None)
    return main(words)
def torchrun(words):
    from torch.distributed import run
    with open(os.environ["NAMESPACE"]) as namespace:
        call("setns", namespace.fileno(), NET)
    call("unshare", MOUNTS | NAMES)
    call("mount", b"none", b"/", None, PRIVATE, None)
    call("mount", os.environ["HOSTS"].encode(), b"/etc/hosts", None, BIND, None)
    socket.sethostname(os.environ["HOST"])
    return run.main(words)
"""
# The command as a rank of torchrun, which then writes down where gloo has listened.
RANK = """
import os, sys
import lockstep_gpt
from lockstep import commands as cli
status = cli.main(sys.argv[1:])
with open(os.environ["GLOO_FILE"], "w") as file:
    file.write(os.environ["GLOO_SOCKET_IFNAME"])
sys.exit(status)
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Nodes:
    """Two machines with a link between them, 10.77.N.1 and 10.77.N.2."""

    def __init__(self, number, folder):
        self.folder = folder
        self.names = [f"t{number}n{node}" for node in (0, 1)]
        self.addresses = [f"10.77.{number % 250}.{node}" for node in (1, 2)]
        self.links = [f"t{number}v{node}" for node in (0, 1)]

    def make(self):
        left, right = self.links
        ip("link", "add", left, "type", "veth", "peer", "name", right)
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, command, node, *overrides, function="main", **environment):
        launch = [f"launch.node_rank={node}", f"launch.rdzv_endpoint={self.addresses[0]}:29511"]
        words = command.smoke("trainer=cpu", "trainer.devices=1", "trainer.num_nodes=2")
        return self._start(command, node, function, *words, *launch, *overrides, **environment)

    def start_torchrun(self, command, node, *overrides):
        """Start torchrun with one rank where the own name is 127.0.1.1, Debian's default."""
        hosts = self.folder / f"hosts{node}"
        addresses = [*self.addresses]
        addresses[node] = "127.0.1.1"
        lines = zip(["127.0.0.1", *addresses], ["localhost", *self.names], strict=True)
        hosts.write_text("".join(f"{address} {name}\n" for address, name in lines))
        endpoint = f"--rdzv_endpoint={self.names[0]}:29513"
        words = ["--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", endpoint]
        program = self.folder / "rank.py"
        program.write_text(RANK)
        words += [str(program), *command.smoke("trainer=cpu", *overrides)]
        machine = {"HOSTS": str(hosts), "HOST": self.names[node]}
        machine["GLOO_FILE"] = str(self.folder / f"gloo{node}")
        return self._start(command, node, "torchrun", *words, **machine)

    def _start(self, command, node, function, *words, **environment):
        (self.folder / "inside.py").write_text(INSIDE)
        path = os.pathsep.join(filter(None, [str(self.folder), environment.get("PYTHONPATH")]))
        environment |= {"PYTHONPATH": path, "NAMESPACE": f"/run/netns/{self.names[node]}"}
        return command.start(*words, target=f"inside:{function}", **environment)

    def link(self, node, state):
        ip("-n", self.names[node], "link", "set", self.links[node], state)

    def lose_all_packets(self):
        """Send packets to an unused hardware address: no error, no answer."""
        for node in (0, 1):
            other, link = self.addresses[1 - node], self.links[node]
            nobody = ("lladdr", "02:00:00:00:00:99", "dev", link, "nud", "permanent")
            ip("-n", self.names[node], "neigh", "replace", other, *nobody)


@pytest.fixture
def nodes(tmp_path_factory):
    made = Nodes(os.getpid() % 10_000, tmp_path_factory.mktemp("nodes"))
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield made
    made.remove()


def ended(*processes, limit=120):
    """Wait for all; return their exit statuses and their stderr output."""
    outputs = [process.communicate(timeout=limit) for process in processes]
    return [process.returncode for process in processes], [err for _, err in outputs]


def weights(folder, step=20):
    return torch.load(folder / f"checkpoints/step={step:06d}.ckpt")["state_dict"]


@pytest.mark.slow
def test_two_nodes_give_the_weights_of_one_with_two_ranks(nodes, two):
    command, _ = two
    run = command.folder / "runs/nodes"
    statuses, errors = ended(*(nodes.start(command, node, f"run_dir={run}") for node in (1, 0)))
    assert statuses == [0, 0], errors
    ours, theirs = weights(run), weights(command.folder / "runs/two")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert command.summary("runs/nodes")["world_size"] == 2


@pytest.mark.slow
def test_two_nodes_of_torchrun_reach_each_other_where_their_own_names_are_loopback(nodes, two):
    command, _ = two
    run = command.folder / "runs/torchrun_nodes"
    words = (f"run_dir={run}", "strategy.timeout_seconds=60")
    processes = [nodes.start_torchrun(command, node, *words) for node in (0, 1)]
    statuses, errors = ended(*processes)
    assert statuses == [0, 0], errors
    interfaces = [(nodes.folder / f"gloo{node}").read_text() for node in (0, 1)]
    assert interfaces == nodes.links  # with `lo` on one, it would depend on gloo who connects
    ours, theirs = weights(run), weights(command.folder / "runs/two")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


LONG = ("max_steps=4000", "log_every=1", "checkpoint.every=10", "val_every=4000")
EXACT = ("batch.exact_micro_size=2", "model.dropout=0.1", "schedule.decay=constant")
QUICK = ("strategy.timeout_seconds=10", "launch.max_restarts=9", "launch.lost_seconds=3")


def steps(run):
    try:
        return len((run / "metrics.csv").read_text().splitlines()) - 1
    except FileNotFoundError:
        return 0


@pytest.fixture
def training(nodes, command, wait_for):
    """Start a long run on both nodes and wait until it trains."""
    started = []

    def start(*overrides, function="main"):
        run = command.folder / "run"
        words = (*LONG, *QUICK, f"run_dir={run}", *overrides)
        started.extend(nodes.start(command, node, *words, function=function) for node in (0, 1))

        def trains():
            assert all(process.poll() is None for process in started), ended(*started)
            return steps(run) > 15

        wait_for(trains)
        assert "1 device x 2 nodes" in (run / "train.log").read_text()
        return run, started

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=240)


@pytest.mark.slow
def test_a_killed_rank_brings_both_nodes_back(training, processes_of, kill, wait_for):
    run, _ = training()
    kill(processes_of(run)[-1])
    before = steps(run)
    wait_for(lambda: steps(run) > before + 15)


@pytest.mark.slow
def test_a_link_that_is_down_for_seconds_heals_unseen(training, nodes, wait_for):
    run, processes = training("strategy.timeout_seconds=60")
    nodes.link(1, "down")
    time.sleep(6)
    nodes.link(1, "up")
    before = steps(run)
    wait_for(lambda: steps(run) > before + 15)
    for process in processes:
        process.terminate()
    statuses, errors = ended(*processes)
    assert statuses == [143, 143]
    assert not any("restarting" in stderr for stderr in errors)


@pytest.mark.slow
def test_after_a_longer_cut_the_nodes_meet_again(training, nodes, wait_for):
    run, _ = training("strategy.timeout_seconds=6")
    nodes.link(1, "down")
    time.sleep(8)  # so that collectives fail; the rendezvous notices after 3
    nodes.link(1, "up")
    before = steps(run)
    wait_for(lambda: steps(run) > before + 15)


@pytest.mark.slow
def test_the_run_continues_without_a_lost_node(training, nodes, command, wait_for):
    late = "strategy.timeout_seconds=8"  # the rendezvous notices after 3 s
    run, processes = training("launch.min_nodes=1", late, *EXACT)
    nodes.link(1, "down")
    processes[1].kill()
    before = steps(run)
    wait_for(lambda: steps(run) > before + 15, seconds=300)
    processes[0].terminate()
    (status,), (stderr,) = ended(processes[0])
    assert status == 143
    assert "restarting all ranks" in stderr
    # The bits equal those of an undisturbed run on one machine.
    ours = torch.load(max((run / "checkpoints").glob("*.ckpt")))["weights"]
    last = f"max_steps={[*ours][-1]}"
    command.train(*LONG, *EXACT, "run_dir=whole", last)
    assert len(ours) > 2
    assert command.summary("whole")["weights"] == {str(step): ours[step] for step in ours}


@pytest.mark.slow
def test_a_silent_drop_ends_by_our_own_limit(training, nodes):
    # Long enough for ranks to start on a busy machine, which isn't a stall.
    limits = ("guard.stall_after=15", "launch.join_seconds=10", "launch.grace_seconds=1")
    _, processes = training(*limits, "launch.max_restarts=1")
    nodes.lose_all_packets()
    statuses, _ = ended(*processes, limit=300)
    assert all(status != 0 for status in statuses)


SHARDED = ("strategy=fsdp2", "optim=muon", "schedule.decay=constant")
MEMORY = ("memory=2", "checkpoint.every=4000", "checkpoint.keep_best=0")


def memory_of(process, run):
    """Return the folder of the run's states in the memory of a machine's process."""
    token = (run / ".token").read_text().strip()
    (folder,) = Path(f"/proc/{process.pid}/root/dev/shm").glob(f"*-{token}")
    return folder


@pytest.mark.slow
def test_a_machine_without_the_newest_state_gets_it_from_another(
    training, processes_of, kill, wait_for
):
    """Nothing is saved on disk: without the other machine's memory, it would start over."""
    run, started = training(*MEMORY, "optim=muon", function="apart")
    before = steps(run)
    shutil.rmtree(memory_of(started[0], run))
    kill(processes_of(run)[-1])
    log = run / "train.log"
    wait_for(lambda: "kept in memory" in log.read_text())
    wait_for(lambda: steps(run) > before + 15)
    step = int(re.search(r"continues from step (\d+), kept in memory", log.read_text())[1])
    assert step >= before - 3
    assert [*memory_of(started[0], run).glob("*.[01]")]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [(), SHARDED], ids=["ddp", "fsdp2"])
def test_the_rest_of_the_machines_continues_from_memory(training, nodes, wait_for, strategy):
    late = "strategy.timeout_seconds=8"
    run, processes = training("launch.min_nodes=1", late, *MEMORY, *strategy, function="apart")
    nodes.link(1, "down")
    processes[1].kill()
    log = run / "train.log"
    wait_for(lambda: "kept in memory" in log.read_text(), seconds=300)
    before = steps(run)
    wait_for(lambda: steps(run) > before + 15)


def assert_undisturbed(run, command, *words):
    """Compare the hashes of the weights in the checkpoints with those of a run on one machine."""
    ours = torch.load(max((run / "checkpoints").glob("*.ckpt")))["weights"]
    last = f"max_steps={[*ours][-1]}"
    command.train(*LONG, *words, "trainer=cpu", "run_dir=whole", last)
    theirs = command.summary("whole")["weights"]
    assert {str(step): ours[step] for step in ours}.items() <= theirs.items()


@pytest.mark.slow
def test_a_replaced_machine_gets_its_shards_from_the_other(training, nodes, command, wait_for):
    run, started = training(*SHARDED, *MEMORY, function="apart")
    before = steps(run)
    started[1].kill()
    words = (*LONG, *QUICK, f"run_dir={run}", *SHARDED, *MEMORY)
    started.append(nodes.start(command, 1, *words, function="apart"))
    log = run / "train.log"
    wait_for(lambda: "kept in memory" in log.read_text(), seconds=300)
    wait_for(lambda: steps(run) > before + 15)
    step = int(re.search(r"continues from step (\d+), kept in memory", log.read_text())[1])
    assert step >= before - 3
    for process in (started[0], started[2]):
        process.terminate()
    statuses, _ = ended(started[0], started[2], limit=240)
    assert statuses == [143, 143]
    assert_undisturbed(run, command, *SHARDED, "trainer.devices=2")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["launch.node_rank=2"], "launch.node_rank=2 must be from 0 to 1"),
        (["launch.rdzv_endpoint=nowhere.invalid:1"], "cannot be reached"),
        (["launch.rdzv_endpoint=null"], "launch.rdzv_endpoint=null with trainer.num_nodes=2"),
    ],
)
def test_a_mistake_about_nodes_fails_in_one_line(nodes, command, overrides, line):
    (status,), (stderr,) = ended(nodes.start(command, 0, "run_dir=run", *overrides))
    assert (status, stderr.count("\n")) == (2, 1)
    assert line in stderr


@pytest.mark.slow
def test_a_late_first_node_is_reported_as_a_temporary_failure(nodes, command):
    words = ("run_dir=run", "launch.node_rank=1", "launch.join_seconds=1")
    (status,), (stderr,) = ended(nodes.start(command, 0, *words))
    assert (status, stderr.count("\n")) == (1, 1)  # not 2, which a retry would not fix
    assert "after 1 s it lacks config.yaml; check" in stderr


@pytest.mark.slow
def test_a_missing_node_is_reported(nodes, command):
    (status,), (stderr,) = ended(nodes.start(command, 0, "run_dir=run", "launch.join_seconds=5"))
    assert status == 1
    assert "not all of 2 machines met at 10.77." in stderr
