"""SLURM, Kubernetes, and SkyPilot start the same command; a preempted run ends with equal bits.

The engines are played by the test: it runs what their files name, preempts it as they do, and
starts the same again. (A real SLURM runs the script in the template's own tests.)
"""

import contextlib
import csv
import os
import re
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml

SCRIPTS = Path(__file__).parents[3] / "scripts"
SKY = yaml.safe_load((SCRIPTS / "sky/train.yaml").read_text("utf-8"))
JOB = [*yaml.safe_load_all((SCRIPTS / "kubernetes/job.yaml").read_text("utf-8"))][-1]
PACE = """
import time, lightning
class Pace(lightning.Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.05)
"""
LONG = ("max_steps=100", "val_every=100", "log_every=1", "checkpoint.every=10")
LONG += ("model.dropout=0.1", "model.n_layer=1", "trainer=cpu", "trainer.devices=1")
PACED = (*LONG, "+callbacks.pace._target_=pace.Pace")
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case $2 in
    hostnames) echo localhost ;;
    node) echo "NodeName=localhost NodeAddr=127.0.0.1 Port=6818" ;;
    *) exit 1 ;;
esac
"""


@dataclass
class Start:
    """What an engine starts, each time: the words, and the variables that it sets."""

    words: list[str]
    run: Path
    environment: dict[str, str] = field(default_factory=dict)
    grace: float = 60.0  # seconds from SIGTERM to SIGKILL
    loses_disk: bool = False


def start_of_slurm(folder, words, count):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_RESTART_COUNT": str(count),
    }
    run = folder / "runs/slurm-77"
    script = ["bash", str(SCRIPTS / "slurm/train.sbatch")]
    return Start([*script, *words, f"run_dir={run}"], run, environment)


def start_of_kubernetes(folder, words, count):  # noqa: ARG001
    pod = JOB["spec"]["template"]["spec"]
    container = pod["containers"][0]
    run = folder / "run"
    _, index, _, _, *rest = container["args"]
    assert index == "$(JOB_COMPLETION_INDEX)"
    grace = [word for word in rest if word.startswith("launch.grace_seconds=")]
    args = ["1", "0", "localhost:29500", str(run), *words, *grace]
    command = [str(SCRIPTS.parent / word) for word in container["command"]]
    return Start([*command, *args], run, grace=pod["terminationGracePeriodSeconds"])


def start_of_sky(folder, words, count):  # noqa: ARG001
    if not (folder / "scripts").exists():
        (folder / "scripts").symlink_to(SCRIPTS)
    environment = {
        **SKY["envs"],
        "OVERRIDES": " ".join(words),
        "RUN_DIR": str(folder / "run"),
        "COPIES": str(folder / "copies"),
        "SKYPILOT_NUM_NODES": str(SKY["num_nodes"]),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
    }
    script = ["bash", "-c", SKY["run"]]
    return Start(script, folder / "run", environment, grace=30.0, loses_disk=True)


STARTS = (start_of_slurm, start_of_kubernetes, start_of_sky)


def weights(run):
    return torch.load(run / "checkpoints/step=000100.ckpt")["state_dict"]


def steps_of(run):
    try:
        return len((run / "metrics.csv").read_text().splitlines()) - 1
    except FileNotFoundError:
        return 0


def first_step_of(run):
    with (run / "metrics.csv").open(newline="") as file:
        return int(next(csv.DictReader(file))["trainer/step"])


@pytest.mark.slow
@pytest.mark.parametrize("start_of", STARTS)
def test_a_preempted_run_ends_with_the_bits_of_an_undisturbed_one(
    start_of, command, wait_for, processes_of, kill, python_of_forks
):
    folder = command.folder
    (folder / "pace.py").write_text(PACE)
    words = f"{python_of_forks} -m lockstep_gpt"
    program = {"TRAIN_COMMAND": words, "PYTHONPATH": str(folder)}
    log = folder / "engine.log"

    def start(count, more):
        started = start_of(folder, command.smoke(*more)[1:], count)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **started.environment, **program}
        with log.open("ab") as output:
            process = subprocess.Popen(
                started.words,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return started, process

    def end(process, run):
        """Kill what is left, as an engine does at the end of its grace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pid in processes_of(run):
            kill(pid)
        wait_for(lambda: not processes_of(run))

    started, process = start(0, PACED)
    run = started.run
    try:
        wait_for(lambda: steps_of(run) > 20, describe=log.read_text)
        os.killpg(process.pid, signal.SIGTERM)
        wait_for(lambda: not processes_of(run) or steps_of(run) > 90, seconds=started.grace)
    finally:
        end(process, run)
    saved = max(path.stem for path in run.glob("checkpoints/*.ckpt"))
    assert "step=000020" < saved < "step=000100"
    if started.loses_disk:  # other machines
        run.rename(folder / "lost")

    started, process = start(1, PACED)
    try:
        status = process.wait(timeout=300)
    finally:
        end(process, run)
    assert status == 0, log.read_text()
    if started.loses_disk:  # metrics.csv is new
        assert first_step_of(run) == int(saved.removeprefix("step=")) + 1
    else:
        assert f"resuming {run}" in log.read_text()
    command.train(*LONG, "run_dir=whole", "verbosity=quiet")
    ours, theirs = weights(run), weights(folder / "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


PRINTING = """#!/usr/bin/env bash
printf "<%s>" "$@"
"""


@pytest.fixture
def task_of_array(tmp_path):
    """Start a task of a job array whose program only prints its words."""
    (tmp_path / "program").write_text(PRINTING)
    (tmp_path / "program").chmod(0o755)

    def start(index, restarts=0, **variables):
        started = start_of_slurm(tmp_path, [], restarts)
        array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": index}
        program = {"TRAIN_COMMAND": str(tmp_path / "program")}
        return subprocess.run(
            started.words[:2],  # without a run_dir
            env={**os.environ, **started.environment, **array, **program, **variables},
            capture_output=True,
            text=True,
        )

    return start


@pytest.mark.parametrize("end", ["\r\n", "\n", "\n\n", ""], ids=repr)
def test_a_task_of_an_array_has_the_overrides_of_its_line(task_of_array, tmp_path, end):
    (tmp_path / "sweep.txt").write_bytes(f"seed=1\r\noptim.lr=1e-3 seed=2{end}".encode())
    done = task_of_array("2", SWEEP="sweep.txt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("<train><optim.lr=1e-3><seed=2><run_dir=runs/slurm-70/2>")


@pytest.mark.parametrize(
    ("content", "index", "line"),
    [
        (b"a=1\n", "2", "--array has the index 2, which must be a line of SWEEP=sweep.txt; use "),
        (b"a=1\n", "0", "--array has the index 0, which must be a line of SWEEP=sweep.txt; use "),
        (b"", "0", "--array has the index 0, which must be a line of SWEEP=sweep.txt; use "),
        (b"a=1\r\n\r\nb=1", "2", "line 2 of SWEEP=sweep.txt must have overrides; add, "),
        (b" \nb=1", "1", "line 1 of SWEEP=sweep.txt must have overrides; add, "),
        (None, "1", "SWEEP=sweep.txt must be a file with a line of overrides for each task; "),
    ],
)
def test_a_task_without_a_line_does_not_train(task_of_array, tmp_path, content, index, line):
    if content is not None:
        (tmp_path / "sweep.txt").write_bytes(content)
    done = task_of_array(index, SWEEP="sweep.txt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"train.sbatch: {line}")
    assert done.stderr.count("\n") == 1


def test_the_file_of_overrides_belongs_to_an_array(task_of_array):
    for index, sweep in (("1", ""), ("", "sweep.txt")):
        done = task_of_array(index, SWEEP=sweep)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"train.sbatch: SWEEP={sweep} ")


def test_a_requeued_task_needs_no_line_once_its_run_has_its_settings(task_of_array, tmp_path):
    assert task_of_array("1", restarts=1, SWEEP="sweep.txt").returncode == 2
    (tmp_path / "runs/slurm-70/1").mkdir(parents=True)
    (tmp_path / "runs/slurm-70/1/config.yaml").touch()
    done = task_of_array("1", restarts=1, SWEEP="sweep.txt")
    assert done.stdout.startswith("<train><trust_run_dir=true><run_dir=runs/slurm-70/1>")


def test_each_engine_s_file_starts_the_same_command():
    script = (SCRIPTS / "kubernetes/train.sh").read_text()
    batch = (SCRIPTS / "slurm/train.sbatch").read_text()
    for name in ("run_dir=", "trainer.num_nodes=", "launch.node_rank=", "launch.rdzv_endpoint="):
        assert name in script
        assert name in batch
    assert JOB["spec"]["template"]["spec"]["containers"][0]["command"] == [
        "scripts/kubernetes/train.sh"
    ]
    assert "exec scripts/kubernetes/train.sh " in SKY["run"]


def test_sky_s_file_sets_every_variable_that_its_script_reads():
    read = set(re.findall(r"\$\{?([A-Z_]+)", SKY["run"]))
    assert {name for name in read if not name.startswith("SKYPILOT_")} < {*SKY["envs"]}
    assert SKY["num_nodes"] == 1  # the run directory is on the machine's own disk


def test_skypilot_reads_its_file():
    sky = pytest.importorskip("sky", reason="needs SkyPilot (pip install skypilot), 460 MB")
    task = sky.Task.from_yaml(str(SCRIPTS / "sky/train.yaml"))
    assert task.num_nodes == SKY["num_nodes"]
    (resources,) = task.resources
    assert resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75, 143]
