"""Stage C: our loop next to others on the same card, and the parts by themselves."""

from __future__ import annotations

import json
import statistics
import sys

from measuring import ROOT, Job, Measurement, Skip, Stage, program

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
    plain = _seconds(result["loops"]["plain"])
    for name, rounds in result["loops"].items():
        seconds = _seconds(rounds)
        job.say(f"{seconds * 1e3:.2f} ms per step, {seconds / plain:.2f} of the plain loop's", name)
    absent = [line for line in output.splitlines() if " does not run: " in line]
    if absent:
        job.say("; ".join(absent), "not run")
    if not job.hour.nanogpt:
        raise Skip("nanoGPT: needs --nanogpt FOLDER, a checkout of it")


def _seconds(rounds: list[dict[str, float]]) -> float:
    return statistics.median(result["step_seconds"] for result in rounds)


def rows_of(name: str) -> Measurement:
    """Return a measurement whose rows one of our programs prints."""

    def measure(job: Job) -> None:
        job.run(program(name))

    return Measurement(name, 150, measure)


STAGE = Stage(
    "C",
    "How does it compare, and what do the parts take?",
    570,
    [
        Measurement("loops", 330, loops),
        rows_of("attention"),
        rows_of("loss"),
        rows_of("optimizers"),
        rows_of("saving"),
    ],
)
