"""Stage D: how fast is a step, and where does its time go?"""

from __future__ import annotations

from collections.abc import Callable

from measuring import Job, Measurement, Stage
from timed_runs import speed

GPT2 = "experiment=gpt2_124m"
MODERN = "experiment=modern_124m"
SHOWN = 30  # kernels in the report; a file has all
LIMIT = 110  # seconds of a run, most of them for compilation


def profiled(*words: str) -> Callable[[Job], None]:
    """Return a measurement of a recipe's speed, and of the kernels of some steps."""

    def measure(job: Job) -> None:
        file = job.hour.out / f"kernels-{words[0].partition('=')[2]}.txt"
        first, steps = 10, 3
        if job.hour.dry:
            first, steps = 1, 1
        callback = [
            "+callbacks.profiled._target_=callbacks.Profiled",
            f"+callbacks.profiled.file={file}",
            f"+callbacks.profiled.first={first}",
            f"+callbacks.profiled.steps={steps}",
        ]
        run = speed(job, "trainer.devices=1", *words, *callback)
        figures, *kernels = file.read_text("utf-8").splitlines()
        notes = f"all kernels in {file.name}"
        job.say(f"{run.speed()}; {figures}", notes=notes, folded="\n".join(kernels[:SHOWN]))

    return measure


STAGE = Stage(
    "D",
    "How fast is a step, and where does its time go?",
    150,
    [
        Measurement("kernels of modern_124m", LIMIT, profiled(MODERN)),
        # The compiler's cache has its graph since stage B.
        Measurement("kernels of gpt2_124m", LIMIT, profiled(GPT2)),
    ],
)
