"""The whole command; each launch has several faults, since ranks take seconds to import."""

import json
import os
import socket
import subprocess

import pytest

from lockstep import commands as cli
from lockstep.errors import UserError
from lockstep.plan.hardware import Hardware

TIMEOUT = 150  # seconds; on an idle machine, no launch takes a tenth of it


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def rank(number, world_size=2, **changes):
    """Return the environment that a launcher sets for a rank on this machine."""
    variables = {
        "RANK": number,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": number,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
    }
    return {name: str(value) for name, value in {**variables, **changes}.items()}


def read(process, status):
    """Wait for the process; return its JSON report."""
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == status, out + err
    return json.loads(out) if out else {}


def wrong(report):
    return {
        finding["check"]: finding for finding in report["findings"] if finding["status"] != "ok"
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory, python_of_forks):
    """The report on two CPU ranks of this machine, and the profile that it saved."""
    folder = tmp_path_factory.mktemp("doctor")
    words = ["doctor", "trainer=cpu", "trainer.devices=2", "--json", "--save-profile", "p.json"]
    done = subprocess.run(
        [python_of_forks, "-m", "lockstep_gpt", *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), folder / "p.json", folder


@pytest.mark.slow
def test_a_healthy_machine_passes_all_checks(sound):
    report = sound[0]
    assert report["status"] in ("ok", "warning")  # the machine may be busy
    assert {finding["check"] for finding in report["findings"]} > {
        "rendezvous",
        "launcher",
        "device",
        "variables",
        "names",
        "shared memory",
        "disk",
        "versions",
        "run directory",
        "clocks",
        "collectives",
        "ddp step",
        "bandwidth",
        "compute speed",
    }


def test_averaged_gradients_are_those_of_the_joined_batch(sound):
    (step,) = [finding for finding in sound[0]["findings"] if finding["check"] == "ddp step"]
    assert step["status"] == "ok"
    assert float(step["line"].split()[-1]) < 1e-12


def test_links_and_ranks_are_measured(sound):
    sizes, ranks = sound[0]["tables"].values()
    assert [row["message"] for row in sizes] == ["4 KiB", "256 KiB", "4,096 KiB", "32,768 KiB"]
    assert [row["rank"] for row in ranks] == [0, 1]
    assert all(row["ms"] > 0 for row in sizes)


def test_the_folder_of_runs_is_unchanged(sound):
    assert [path.name for path in sound[2].iterdir()] == ["p.json"]


@pytest.mark.slow
def test_plan_reads_the_doctor_s_profile(sound, capsys):
    profile = Hardware.load(sound[1])
    words = ["--hardware", str(sound[1]), "--devices", "1,2", "--json"]
    assert cli.main(["plan", "experiment=smoke", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["hardware"]["measured"]
    assert plan["rows"][1]["time"]["all_reduce"] > 0
    assert profile.intra.bandwidth > 1e6
    with pytest.raises(UserError, match="is only known for fp32"):
        profile.flops("bf16-mixed")


def test_unequal_versions_world_sizes_and_one_device_for_two_are_named(command):
    other = command.folder / "other"
    (other / "numpy-9.9.9.dist-info").mkdir(parents=True)
    (other / "numpy-9.9.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n"
    )
    words = ["doctor", "trainer=cpu", "--json"]
    port, path = {"MASTER_PORT": str(free_port())}, os.environ.get("PYTHONPATH", "")
    odd = {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "PYTHONPATH": f"{other}:{path}"}
    first = command.start(*words, **rank(0), **port)
    second = command.start(*words, **(rank(1) | odd), **port)
    findings = wrong(read(first, 1))
    assert read(second, 1) == {}
    assert findings["versions"]["line"].endswith("on rank 0, 9.9.9 on rank 1")
    assert findings["launcher"]["line"] == "WORLD_SIZE is 2 on rank 0, 4 on rank 1"
    assert findings["devices"]["line"].startswith("ranks 0-1 of ")


OTHERWISE = """
import os, sys, time
import lockstep_gpt
from lockstep.commands import main
elsewhere = sys.argv.pop(1)
if os.environ["RANK"] == "1":
    os.chdir(elsewhere)
    # On a clock that runs 50 times as fast, this rank is slow however busy the machine is.
    clock = time.perf_counter
    time.perf_counter = lambda: 50 * clock()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_under_torchrun_a_slow_rank_and_a_folder_that_is_not_shared_are_named(
    command, python_of_forks
):
    (command.folder / "elsewhere").mkdir()
    script = command.folder / "otherwise.py"
    script.write_text(OTHERWISE)
    launch = [python_of_forks, "-m", "torch.distributed.run", "--nproc_per_node=2", str(script)]
    words = ["elsewhere", "doctor", "trainer=cpu", "--json"]
    out, _ = command.start_words([*launch, *words]).communicate(timeout=TIMEOUT)
    findings = wrong(json.loads(out))
    assert findings["run directory"]["status"] == "failure"
    assert findings["run directory"]["line"].startswith("rank 1 does not see what rank 0 writes")
    assert findings["compute speed"]["line"].startswith("rank 1 too slow")


@pytest.mark.slow
def test_a_loopback_name_a_full_shared_memory_and_a_missing_rank_are_named(command, apart):
    hosts = command.folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
    mounts = f"mount --bind {hosts} /etc/hosts && mount -t tmpfs -o size=1m none /dev/shm"
    doctor = ("doctor", "trainer=cpu", "--wait", "2", "--json")
    alone = rank(0, LOCAL_WORLD_SIZE=1, MASTER_PORT=free_port())
    report = read(apart(mounts, *doctor, **alone), 1)
    findings = wrong(report)
    assert "resolves to 127.0.1.1" in findings["names"]["line"]
    assert findings["shared memory"]["line"].startswith("1 MiB free in /dev/shm")
    assert findings["rendezvous"]["line"] == "rank 1 did not arrive within 2 s"
    assert report["seconds"] < 60


def outside_address():
    """An address of this machine other than loopback; None without a network or `nodes`."""
    try:
        from lockstep.launch.address import own_address

        return own_address("192.0.2.1:9")[0]  # in a documentation network; nothing is sent
    except (ImportError, UserError):
        return None


@pytest.mark.skipif(outside_address() is None, reason="no interface but the loopback")
def test_two_machines_meet_at_the_endpoint_of_training(command, python_of_forks):
    endpoint = f"launch.rdzv_endpoint={outside_address()}:{free_port()}"
    words = ["doctor", "trainer=cpu", "trainer.devices=1", "trainer.num_nodes=2", endpoint]
    doctor = [python_of_forks, "-m", "lockstep_gpt", *words, "--json"]
    first, second = (command.start_words([*doctor, f"launch.node_rank={node}"]) for node in (0, 1))
    report = read(first, 0)
    assert read(second, 0) == {}
    assert report["world_size"] == 2
    assert {row["link"] for row in report["tables"]["all-reduce, slowest rank"]} == {
        "between nodes"
    }
    assert wrong(report)["devices"]["line"] == "ranks 0-1 count as nodes but share one machine"


def test_machines_without_an_endpoint_get_an_error(capsys):
    assert cli.main(["doctor", "trainer=cpu", "trainer.num_nodes=2"]) == 1
    assert "launch.rdzv_endpoint=null with trainer.num_nodes=2" in capsys.readouterr().out


def test_missing_devices_are_a_finding(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "trainer=gpu", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["line"].startswith("trainer.accelerator=gpu needs a GPU, but no GPUs were found")


@pytest.mark.gpu
def test_one_gpu_is_examined_and_two_ranks_on_it_are_rejected(command):
    assert "cuda:0" in command("doctor", "trainer=gpu", "trainer.devices=1").stdout
    port = {"MASTER_PORT": str(free_port())}
    gloo = "strategy.process_group_backend=gloo"
    ranks = [
        command.start("doctor", "trainer=gpu", gloo, "--json", **place, **port)
        for place in (rank(0, LOCAL_WORLD_SIZE=1), rank(1, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1))
    ]
    findings = wrong(read(ranks[0], 1))
    assert "share one device, GPU-" in findings["devices"]["line"]
    read(ranks[1], 1)
