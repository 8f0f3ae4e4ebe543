"""Stage B: how fast is a step, and where does its time go?"""

from __future__ import annotations

from collections.abc import Callable

from measuring import Job, Measurement, Stage
from timed_runs import measure_speed, speed

GPT2 = "experiment=gpt2_124m"
MODERN = "experiment=modern_124m"
SHOWN = 30  # kernels in the report; a file has all
LIMIT = 200  # seconds of a run, most of them for compilation


def profiled(*words: str) -> Callable[[Job], None]:
    """Return a measurement of the kernels of a recipe's steps."""

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
        speed(job, "trainer.devices=1", *words, *callback)
        figures, *kernels = file.read_text("utf-8").splitlines()
        job.say(figures, notes=f"all kernels in {file.name}", folded="\n".join(kernels[:SHOWN]))

    return measure


def run_of(name: str, *words: str, **environment: str) -> Measurement:
    """Return the measurement of a recipe's speed."""
    return Measurement(name, LIMIT, measure_speed(*words, **environment))


STAGE = Stage(
    "B",
    "How fast is a step, and where does its time go?",
    570,
    [
        Measurement("kernels of gpt2_124m", LIMIT, profiled(GPT2)),
        Measurement("kernels of modern_124m", LIMIT, profiled(MODERN)),
        run_of("modern_124m", MODERN),
        # Without a peer, only the compiled graph differs: DDP splits it at each bucket.
        run_of("DDP, buckets of 25 MiB", GPT2, "strategy=ddp"),
        run_of("DDP, buckets of 1000 MiB", GPT2, "strategy=ddp", "strategy.bucket_cap_mb=1000"),
        run_of("coordinate descent", GPT2, TORCHINDUCTOR_COORDINATE_DESCENT_TUNING="1"),
        run_of("autotuned products", GPT2, TORCHINDUCTOR_MAX_AUTOTUNE_GEMM="1"),
        run_of("micro_size 16", GPT2, "batch.micro_size=16"),
        # Above most_whole_logits on an H100: the loss is computed in chunks.
        run_of("micro_size 64", GPT2, "batch.micro_size=64"),
        run_of("eager", GPT2, "compile=false"),
        # On by default: compare with gpt2_124m in stage A.
        run_of("expandable segments off", GPT2, PYTORCH_ALLOC_CONF="expandable_segments:False"),
        run_of("expandable segments on", GPT2, PYTORCH_ALLOC_CONF="expandable_segments:True"),
    ],
)
