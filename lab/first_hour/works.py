"""Stages B and C: does it work? If something fails here, mend it first, and run them again."""

from __future__ import annotations

import importlib.util
import re
import sys

from measuring import ROOT, Failure, Job, Measurement, Skip, Stage
from timed_runs import COMMAND, command, measure_speed, new_folder, smoke

# About seven short runs; `pytest -m gpu` without names has all.
TESTS = (
    "test_the_loss_of_a_large_vocabulary_has_the_gradients_of_plain_logits",
    "test_a_compiled_run_gives_the_losses_of_an_eager_one[bf16-mixed]",
    "test_gpu_gives_the_losses_of_the_cpu[bf16-mixed-0.03]",
    "test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_killed[muon-bf16-mixed]",
)
TEST_PACKAGES = ("pytest", "xdist", "pytest_timeout", "hypothesis")
GPU_REPORT = ROOT / "runs/gpu_report.txt"  # the project's tests of GPUs add to it


def smoke_through_an_agent(job: Job) -> None:
    """Run the smallest experiment as users do: an agent starts the ranks."""
    run = smoke(job, "trainer.devices=1")
    job.say(f"val_loss {run.summary['val_loss']:.4f}", notes=run.receipt("devices", "strategy"))


def ddp_at_world_size_one(job: Job) -> None:
    """Run DDP and its process group on one device."""
    backend = "+callbacks.backend._target_=callbacks.Backend"
    run = smoke(job, "trainer.devices=1", "strategy=ddp", backend)
    job.say(f"val_loss {run.summary['val_loss']:.4f}", notes=checked_backend(job, run.output))


def torchrun_with_one_rank(job: Job) -> None:
    """Join torchrun, which must not change the backend."""
    folder = new_folder(job)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1")
    words = ("experiment=smoke", "callbacks.sample=null", "strategy=ddp")
    backend = "+callbacks.backend._target_=callbacks.Backend"
    output = job.run(command(job, folder, *words, backend, launcher=torchrun))
    job.say(checked_backend(job, output))


def checked_backend(job: Job, output: str) -> str:
    """Return what `callbacks.Backend` has printed, unless ranks use another backend than NCCL."""
    expected = "gloo" if job.hour.dry else "nccl"
    match = re.search(r"^backend (\S+), .*$", output, re.MULTILINE)
    if match is None or match[1] != expected:
        used = match[0] if match else "no backend was printed"
        raise Failure(f"{used}; expected {expected}")
    return match[0]


def tests_of_gpus(job: Job) -> None:
    """Run some of the project's own tests that need a GPU; without one, they skip themselves."""
    absent = [name for name in TEST_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise Skip(f"needs {', '.join(absent)}; see the group `test` in pyproject.toml")
    before = GPU_REPORT.stat().st_size if GPU_REPORT.is_file() else 0
    words = ["-m", "gpu", "-q", "--durations=10", "-p", "no:cacheprovider"]
    words += ["-p", "no:benchmark"]  # where it is installed, it warns, and a warning is an error
    folder = f"--basetemp={job.hour.out / 'pytest'}"
    tests = [f"engine/tests/test_gpu.py::{name}" for name in TESTS]
    output = job.run([sys.executable, "-m", "pytest", *words, folder, *tests])
    measured = ""
    if GPU_REPORT.is_file():
        measured = GPU_REPORT.read_text("utf-8")[before:]
    job.say(output.strip().splitlines()[-1], folded=measured)


def doctor(job: Job) -> None:
    """Measure the machine: products, memory, links."""
    profile = job.hour.out / "profile.json"
    words = [f"trainer={job.hour.trainer}", "precision=bf16-mixed", "experiment=smoke"]
    words += ["batch.global_size=512", f"data.root={job.hour.out / 'data'}"]  # for any devices
    flags = ["--save-profile", profile]
    output = job.run([*COMMAND, "doctor", *words, f"run_dir={job.folder()}", *flags])
    lines = output.strip().splitlines()
    job.say(lines[-1], notes="saved in profile.json", folded=output)


WORKS = Stage(
    "B",
    "Does it work?",
    150,
    [
        Measurement("smoke run, ranks of an agent", 60, smoke_through_an_agent),
        # The claim itself, early: the whole recipe's step.
        Measurement("gpt2_124m", 120, measure_speed("experiment=gpt2_124m")),
        Measurement("DDP at world size 1", 60, ddp_at_world_size_one),
        Measurement("torchrun, 1 rank, default backend", 60, torchrun_with_one_rank),
    ],
)
TESTED = Stage(
    "C",
    "Do the project's own tests pass?",
    150,
    [
        Measurement("pytest -m gpu", 120, tests_of_gpus),
        Measurement("doctor", 60, doctor),
    ],
)
