"""A real SLURM with two nodes on this machine: a killed rank, a requeued job, an array."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged", "ip")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(program, path=PATH) for program in PROGRAMS),
        reason="needs root, iproute2, and Debian's slurm-wlm and munge",
    ),
]
SCRIPT = Path(__file__).parents[3] / "scripts/slurm/train.sbatch"
CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
SlurmUser=root
FirstJobId={first_job}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=20
SlurmdTimeout=15
NodeName=n[0-1] NodeHostname={host} NodeAddr={address} Port=[{ports[1]},{ports[2]}] CPUs=4
PartitionName=all Nodes=n[0-1] Default=YES
"""


def free_ports(count):
    """Return ports below the range that outgoing connections use.

    Each process looks in a range of its own, so that test sessions side by side do not pick a port
    twice before a daemon listens on it.
    """
    first = 20000 + 20 * os.getpid() % 6000
    ports = []
    for port in range(first, first + 20):
        with socket.socket() as probe:
            if len(ports) < count and probe.connect_ex(("127.0.0.1", port)):
                ports.append(port)
    return ports


def first_job():
    """Return the number of the first job: a job's ranks meet at port 20000 + 100 * job.

    Each session has numbers of its own. Their ports are above those of `free_ports`, and below
    those of outgoing connections.
    """
    return 60 + 5 * (os.getpid() % 13)


class Slurm:
    """SLURM's daemons, on an address of this machine other than loopback."""

    def __init__(self, folder):
        self.folder = folder
        self.link = f"slurm{os.getpid() % 10**7}"
        self.address = f"10.78.{os.getpid() % 250}.1"
        self.environment = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons = []

    def start(self):
        peer = f"{self.link}x"
        self.run("ip", "link", "add", self.link, "type", "veth", "peer", "name", peer)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", self.link)
        self.run("ip", "link", "set", self.link, "up")
        host = socket.gethostname().split(".")[0]
        values = {"host": host, "address": self.address, "folder": self.folder}
        conf = CONF.format(**values, ports=free_ports(3), first_job=first_job())
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o600)
        self.munged()
        self.daemon("slurmctld", "-D", "-i")
        for node in ("n0", "n1"):
            self.daemon("slurmd", "-D", "-N", node)

    def munged(self):
        files = [f"--{name}={self.folder}/munge.{name}" for name in ("socket", "seed-file")]
        names = {"pid-file": "munge.pid", "log-file": "munge.log", "key-file": "key"}
        files += [f"--{option}={self.folder}/{name}" for option, name in names.items()]
        self.daemon("munged", "--foreground", "--force", *files)

    def daemon(self, *words):
        with (self.folder / f"{words[0]}.out").open("a") as out:
            self.daemons.append(
                subprocess.Popen(
                    words, env={**os.environ, **self.environment}, stdout=out, stderr=out
                )
            )

    def stop(self):
        self.run("scancel", "--user=root", check=False)
        end = time.monotonic() + 30
        while self.run("squeue", "--noheader", check=False) and time.monotonic() < end:
            time.sleep(0.5)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            daemon.wait(20)
        self.run("ip", "link", "del", self.link, check=False)

    def run(self, *words, check=True, **more):
        environment = {**os.environ, **self.environment, **more.pop("env", {})}
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=30, check=False, **more
        )
        assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def submit(self, folder, *words, **environment):
        """Submit a job from `folder`; return its number."""
        program = f"{sys.executable} -m lockstep_gpt"
        variables = {"TRAIN_COMMAND": program, **environment}
        options = [word for word in words if word.startswith("--")]
        overrides = [word for word in words if not word.startswith("--")]
        submit = ["sbatch", "--parsable", "--time=10", *options, str(SCRIPT), *overrides]
        return self.run(*submit, cwd=folder, env={"OMP_NUM_THREADS": "1", **variables})

    def is_started(self, job):
        """Let a requeued job start soon; by default, SLURM delays it for minutes.

        Not at once: a node rejects credentials from the second in which it revoked the last ones,
        and SLURM then holds the job until someone releases it.
        """
        details = self.run("scontrol", "show", "job", job)
        state = re.search(r"JobState=(\w+)", details)[1]
        assert state not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), details
        if state == "PENDING":
            soon = (datetime.now() + timedelta(seconds=4)).isoformat()
            if re.search(r"EligibleTime=(\S+)", details)[1] > soon:
                when = "starttime=now+3seconds"
                self.run("scontrol", "update", f"jobid={job}", when, check=False)
            if "Priority=0 " in details:
                self.run("scontrol", "release", job, check=False)
        return state in ("RUNNING", "COMPLETED")  # not still being cleaned up

    def state(self, job):
        """Return the state and the number of restarts of a job."""
        details = self.run("scontrol", "show", "job", job)
        return re.search(r"JobState=(\w+)", details)[1], int(
            re.search(r"Restarts=(\d+)", details)[1]
        )

    def report(self, job):
        """Return SLURM's information on a job, and the last log lines of its daemons."""
        logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
        return "\n".join([self.run("scontrol", "show", "job", job), *logs])


@pytest.fixture(scope="module")
def slurm():
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # paths of sockets must be short
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            end = time.monotonic() + 40
            while slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False) != "2":
                output = "\n".join(path.read_text() for path in Path(folder).glob("*.out"))
                assert time.monotonic() < end, f"no idle nodes\n{output}"
                time.sleep(0.3)
            yield slurm
        finally:
            slurm.stop()


# Slow enough to be hit in the middle on any machine; it doesn't change any weight.
PACE = """
import time, lightning
class Pace(lightning.Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.05)
"""
LONG = ("max_steps=150", "val_every=150", "log_every=1", "checkpoint.every=20", "model.n_layer=1")
LONG += ("model.dropout=0.1",)  # random numbers must also continue


def step_count(run):
    try:
        return len((run / "metrics.csv").read_text().splitlines()) - 1
    except FileNotFoundError:
        return 0


def weights(run):
    return torch.load(run / "checkpoints/step=000150.ckpt")["state_dict"]


def ranks_of(run):
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text().replace("\0", " ").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "lockstep.launch.rank_program" in words and str(run) in words:
            pids.append(int(entry.name))
    return pids


@pytest.mark.slow
def test_job_that_was_hit_and_requeued_ends_with_the_same_bits(
    slurm, command, wait_for, kill, python_of_forks
):
    (command.folder / "pace.py").write_text(PACE)
    run = command.folder / "run"
    pace = "+callbacks.pace._target_=pace.Pace"
    words = command.smoke(*LONG, "trainer=cpu", "trainer.devices=1", pace, f"run_dir={run}")[1:]
    # Forks: both nodes start twice. The jobs of the array below are new programs.
    program = {"TRAIN_COMMAND": f"{python_of_forks} -m lockstep_gpt"}
    job = slurm.submit(command.folder, *words, PYTHONPATH=str(command.folder), **program)
    log = command.folder / f"slurm-{job}.log"

    wait_for(lambda: step_count(run) > 30)
    kill(max(ranks_of(run)))
    wait_for(lambda: "was killed by SIGKILL; restarting all ranks (1 of 3)" in log.read_text())
    wait_for(lambda: step_count(run) > 60)
    slurm.run("scancel", "--signal=USR1", job)
    wait_for(lambda: slurm.state(job)[1] == 1)
    assert command.summary("run")["status"] == "stopped"
    wait_for(lambda: not ranks_of(run))

    wait_for(lambda: slurm.is_started(job), describe=lambda: slurm.report(job))
    wait_for(lambda: slurm.state(job)[0] == "COMPLETED", describe=lambda: slurm.report(job))
    command.train(*LONG, "trainer=cpu", "trainer.devices=2", "run_dir=whole", "verbosity=quiet")
    assert f"resuming {run}" in log.read_text()
    assert command.summary("run")["world_size"] == 2
    ours, theirs = weights(run), weights(command.folder / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_array_runs_a_line_of_the_sweep_in_each_task(slurm, command, wait_for):
    (command.folder / "sweep.txt").write_text("optim.lr=1e-3\noptim.lr=-1 seed=2\n")
    words = command.smoke("trainer=cpu", "trainer.devices=1")[1:]
    array = ("--nodes=1", "--array=1-2")
    job = slurm.submit(command.folder, *array, *words, SWEEP="sweep.txt")
    wait_for(lambda: not slurm.run("squeue", "--noheader"))
    assert command.summary(f"runs/slurm-{job}/1")["peak_lr"] == pytest.approx(1e-3)
    assert slurm.state(f"{job}_2")[0] == "FAILED"
    output = "".join(path.read_text() for path in command.folder.glob("slurm-*.log"))
    assert "optim.lr=-1 must be above 0" in output
    assert "start 1 of 3" not in output


@pytest.mark.slow
def test_tasks_of_plain_srun_are_ranks_of_one_run(slurm, command):
    words = command.smoke("trainer=cpu", "max_steps=10", "run_dir=run")
    program = [sys.executable, "-m", "lockstep_gpt", *words]
    job = ["srun", "--nodes=1", "--ntasks=2", "--time=5", "--overcommit", *program]
    environment = {**os.environ, **slurm.environment, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        job, cwd=command.folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert command.summary("run")["world_size"] == 2
    assert done.stdout.count("val_loss") == 1
