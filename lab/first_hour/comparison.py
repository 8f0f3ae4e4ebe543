"""Stage E: our loop next to others on the same card, and the parts by themselves."""

from __future__ import annotations

import json
import statistics
import sys

from measuring import ROOT, Failure, Job, Measurement, Skip, Stage, program

LARGE = "large optimizers=1000"  # only the measurement's own limit counts
BENCHMARK = ROOT / "lab/benchmark.py"  # only where the project is developed


def loops(job: Job) -> None:
    """Compare ours, a plain loop, and nanoGPT, compiled, with the same micro-batch."""
    if not BENCHMARK.is_file():
        raise Skip("needs lab/benchmark.py, which only the template's repository has")
    file = job.hour.out / "loops.json"
    file.unlink(missing_ok=True)
    words = ["--precisions", "bf16-mixed", "--rounds", "1", "--loops", "ours,plain"]
    if job.hour.dry:
        words += ["--device", "cpu", "--models", "toy", "--steps", "4"]
    else:
        words += ["--device", "cuda", "--models", "gpt2", "--steps", "8", "--compile"]
    if job.hour.nanogpt:
        words += ["--nanogpt", str(job.hour.nanogpt)]
    output = job.run([sys.executable, BENCHMARK, *words, "--json", file])
    (result,) = json.loads(file.read_text("utf-8"))["results"]
    absent = [line for line in output.splitlines() if " does not run: " in line]
    if "plain" not in result["loops"]:
        raise Failure("; ".join(absent))
    plain = _seconds(result["loops"]["plain"])
    for name, rounds in result["loops"].items():
        seconds = _seconds(rounds)
        job.say(f"{seconds * 1e3:.2f} ms per step, {seconds / plain:.2f} of the plain loop's", name)
    if absent:
        job.say("; ".join(absent), "not run")
    if not job.hour.nanogpt:
        raise Skip("nanoGPT: needs --nanogpt FOLDER, a checkout of it")


def _seconds(rounds: list[dict[str, float]]) -> float:
    return statistics.median(result["step_seconds"] for result in rounds)


def large_optimizers(job: Job) -> None:
    """Time optimizers at sizes that stage A has no time for."""
    job.run([sys.executable, "-m", "parts", "--seconds", f"{job.seconds_left:.0f}", LARGE])


def saving(job: Job) -> None:
    """Time checkpoints."""
    job.run(program("saving"))


STAGE = Stage(
    "E",
    "How does it compare, and what do its parts take?",
    150,
    [
        Measurement("loops", 130, loops),
        Measurement("saving", 45, saving),
        Measurement("large optimizers", 60, large_optimizers),
    ],
)
