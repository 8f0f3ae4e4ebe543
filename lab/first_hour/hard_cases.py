"""Stages F and G: what no test on a CPU reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from measuring import Job, Measurement, Stage
from timed_runs import (
    COMMAND,
    Run,
    command,
    new_folder,
    refuse_different,
    smoke,
    speed,
)

BILLION = (
    "experiment=modern_124m",
    "model=modern_1b",
    "model.ngram_rows=0",
    "batch.micro_size=8",
    "compile=false",  # as `plan` counts
)
MUON = ("optim=muon", "model=modern_nano", "model.ngram_rows=0")
BILLION_BATCH = 16
# Part of a card's name -> what `plan` calls it; the memory that a run needs depends little on it.
CARDS = {"H200": "h200", "B200": "b200", "A100": "a100-80", "L40S": "l40s", "L4": "l4", "T4": "t4"}
STOPPED = 128 + 15  # exit status after SIGTERM


def fsdp2_over_one_rank(job: Job) -> None:
    """Compare FSDP2 and Muon's exchange, over one rank, with a run without; both compiled."""
    one = ["trainer.devices=1", *MUON, *_compiled(job)]
    whole = smoke(job, *one, name="whole")
    own = "strategy._target_=callbacks.sharded_over_one_rank"
    sharded = smoke(job, *one, "strategy=fsdp2", own, name="sharded")
    losses = [run.summary["val_loss"] for run in (whole, sharded)]
    difference = f"difference {abs(losses[0] - losses[1]):.1e}"
    job.say(f"val_loss {losses[1]:.5f}, {difference}", notes=sharded.receipt("strategy"))


def documents_apart(job: Job) -> None:
    """Keep documents apart on the CPU, eagerly, and compiled: losses must agree."""
    shape = ("model.block_size=128", "model.n_embd=64", "precision=32-true", "trainer.devices=1")
    for name, words in {
        "CPU": ["trainer=cpu"],
        "eager": [],
        "compiled": _compiled(job),
    }.items():
        run = smoke(job, *shape, "callbacks=[default,documents]", *words, name=name)
        job.say(f"val_loss {run.summary['val_loss']:.5f}", name)


def equal_bits_over_nccl(job: Job) -> None:
    """Add gradients in one order, alone and in DDP over NCCL: the bits must be equal."""
    words = ("trainer.devices=1", "batch.exact_micro_size=2", *_compiled(job))
    runs = [smoke(job, *words, f"strategy={name}", name=name) for name in ("auto", "ddp")]
    refuse_different(*runs)
    job.say(f"equal: {runs[0].last_hash[:12]}", notes=runs[1].receipt("strategy"))


def stop_and_resume(job: Job) -> None:
    """Send SIGTERM in the middle of a run, which saves, and resume it to the end."""
    steps = 200 if job.hour.dry else 5000
    folder = new_folder(job)
    words = ["experiment=smoke", "callbacks.sample=null", f"max_steps={steps}"]
    words += [f"val_every={steps}", "trainer.devices=1"]
    metrics = folder / "metrics.csv"
    with job.started(command(job, folder, *words)) as process:
        while process.poll() is None and not _has_rows(metrics):
            job.wait()
        process.terminate()
        while process.poll() is None:
            job.wait()
    job.checked(process.returncode, STOPPED)
    stopped = Run(folder, job.output()).summary["step"]
    resume = [*COMMAND, "train", f"run_dir={folder}", "resume=auto"]
    job.run(resume)
    summary = Run(folder, job.output()).summary
    job.say(f"stopped after step {stopped}, then {summary['status']} at step {summary['step']}")


def _has_rows(metrics: Path) -> bool:
    return metrics.is_file() and metrics.read_text("utf-8").count("\n") > 1


def memory_of_a_billion(job: Job) -> None:
    """Compare the memory that `plan` predicts for 1.3 billion parameters with a run's."""
    batch = ["batch.global_size=16", "trainer=cpu" if job.hour.dry else "trainer=gpu"]
    devices = job.hour.report.facts["devices"]
    hardware = next((name for card, name in CARDS.items() if card in devices), "h100")
    flags = ["--hardware", hardware, "--devices", "1", "--json"]
    output = job.run([*COMMAND, "plan", *BILLION, *batch, *flags])
    (row,) = json.loads(output[output.index("{") :])["rows"]
    planned = sum(row["memory"].values()) / 1e9
    job.say(f"{planned:.1f} GB", "planned", notes=f"for {hardware}")
    run = speed(job, "trainer.devices=1", *BILLION, "max_steps=12", batch=BILLION_BATCH)
    peak = run.summary["peak_memory_gb"]
    job.say(f"{run.speed()}; {peak / planned:.2f} of the plan", "measured")


def _compiled(job: Job) -> Sequence[str]:
    return () if job.hour.dry else ("compile=true",)


STRATEGIES = Stage(
    "F",
    "What no test on a CPU reaches: strategies over NCCL, signals",
    150,
    [
        Measurement("FSDP2 with Muon over one rank", 90, fsdp2_over_one_rank),
        Measurement("equal bits alone and in DDP", 90, equal_bits_over_nccl),
        Measurement("SIGTERM and resume", 60, stop_and_resume),
    ],
)
SIZES = Stage(
    "G",
    "What no test on a CPU reaches: memory, documents",
    150,
    [
        Measurement("memory of 1.3 billion parameters", 90, memory_of_a_billion),
        Measurement("documents apart", 90, documents_apart),
    ],
)
