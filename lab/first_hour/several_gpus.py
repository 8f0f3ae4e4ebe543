"""Stage E: several GPUs of one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable

from measuring import PROGRAMS, Failure, Job, Measurement, Skip, Stage
from timed_runs import command, new_folder, refuse_different, smoke, speed
from works import checked_backend

SAMPLES = 8  # of a step of the smoke experiment: ranks must divide it
BATCH = 512  # samples of a step, the same for any number of devices: that of the recipes
# Slower, but atomic additions in other kernels may round in another order.
EXACT = "+trainer.deterministic=true"
# A line here adds a row: the name, and the settings.
RECIPES_ON_ALL = {
    "modern_124m, ddp": ("experiment=modern_124m", "strategy=ddp"),
    "modern_124m, fsdp2": ("experiment=modern_124m", "strategy=fsdp2"),
    "gpt2_124m, tensor parallel": (
        "experiment=gpt2_124m",
        "strategy=fsdp2",
        "strategy.tensor_parallel=2",
        "model.dropout=0",
    ),
}


def need_several(measure: Callable[[Job], None]) -> Callable[[Job], None]:
    """Return a measurement that is skipped on a single device."""

    def measure_or_skip(job: Job) -> None:
        if job.hour.devices < 2:
            raise Skip(f"needs two devices; here: {job.hour.devices}")
        measure(job)

    return measure_or_skip


def torchrun(devices: int) -> list[str]:
    """Return the words that start a program on this many ranks."""
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={devices}"]


def device_counts(most: int) -> list[int]:
    """Return 1, the largest power of two, and those between: the most valuable first."""
    counts = [1]
    while counts[-1] * 2 <= most:
        counts.append(counts[-1] * 2)
    return [1, *reversed(counts[1:])]


def smoke_devices(job: Job) -> int:
    """Return how many devices the smoke experiment can use."""
    return min(SAMPLES, device_counts(job.hour.devices)[1])


def join_torchrun(job: Job) -> None:
    """Train under torchrun with the default backend."""
    words = ("experiment=smoke", "callbacks.sample=null", "strategy=ddp")
    backend = "+callbacks.backend._target_=callbacks.Backend"
    launcher = torchrun(smoke_devices(job))
    output = job.run(command(job, new_folder(job), *words, backend, launcher=launcher))
    job.say(checked_backend(job, output))


def survive_a_kill(job: Job) -> None:
    """Kill a rank with SIGKILL: all ranks restart, and end with an undisturbed run's bits."""
    words = [f"trainer.devices={smoke_devices(job)}", "strategy=ddp", EXACT]
    whole = smoke(job, *words, name="whole")
    hit = job.hour.out / "runs" / "hit"
    hit.unlink(missing_ok=True)
    killer = ["+callbacks.killer._target_=callbacks.Killer", f"+callbacks.killer.hit={hit}"]
    killed = smoke(job, *words, *killer, name="killed")
    if "was killed by SIGKILL; restarting all ranks" not in killed.output:
        raise Failure("no rank was killed and restarted")
    refuse_different(whole, killed)
    seconds = killed.summary["wall_seconds"]
    job.say(f"equal: {whole.last_hash[:12]}", notes=f"{seconds:.0f} s after the restart")


def keep_the_bits(job: Job) -> None:
    """Train on 1 device and on all, with sums in one order: the bits must be equal."""
    devices = smoke_devices(job)
    exact = [f"batch.exact_micro_size={SAMPLES // devices}", EXACT]
    one = smoke(job, *exact, "trainer.devices=1", name="one")
    several = smoke(job, *exact, f"trainer.devices={devices}", "strategy=ddp", name="several")
    refuse_different(one, several)
    job.say(f"equal on 1 and {devices} devices: {one.last_hash[:12]}")


def synchronize_batchnorm(job: Job) -> None:
    """Compare BatchNorm over ranks with that of the joined batch."""
    if job.hour.dry:
        raise Skip("torch's SyncBatchNorm needs GPUs")
    job.run([*torchrun(job.hour.devices), PROGRAMS / "sync_batchnorm.py"])


def scaling(strategy: str) -> Callable[[Job], None]:
    """Return a measurement of speed on 1, 2, 4, and more devices, with the same batch."""

    def measure(job: Job) -> None:
        alone = 0.0
        for devices in device_counts(job.hour.devices):
            place = [f"trainer.devices={devices}", f"strategy={strategy}", "max_steps=12"]
            run = speed(job, "experiment=gpt2_124m", *place, name=str(devices), batch=BATCH)
            alone = alone or run.tokens_per_second
            efficiency = run.tokens_per_second / devices / alone
            name = f"{devices} device{'s' if devices > 1 else ''}"
            notes = run.receipt("strategy")
            job.say(f"{run.speed()}; efficiency {efficiency:.1%}", name, notes=notes)

    return measure


def run_on_all(words: tuple[str, ...]) -> Callable[[Job], None]:
    """Return a measurement of a recipe's speed on all devices."""

    def measure(job: Job) -> None:
        devices = device_counts(job.hour.devices)[1]
        place = [f"trainer.devices={devices}", "max_steps=12"]
        run = speed(job, *words, *place, batch=BATCH)
        job.say(run.speed(), notes=run.receipt("strategy"))

    return measure


STAGE = Stage(
    "E",
    "Several GPUs",
    1200,
    [
        Measurement("torchrun, default backend", 90, need_several(join_torchrun)),
        Measurement("kill -9 of a rank", 150, need_several(survive_a_kill)),
        Measurement("equal bits on 1 and several", 120, need_several(keep_the_bits)),
        Measurement("SyncBatchNorm", 60, need_several(synchronize_batchnorm)),
        Measurement("gpt2_124m, ddp", 420, need_several(scaling("ddp"))),
        Measurement("gpt2_124m, fsdp2", 420, need_several(scaling("fsdp2"))),
        *(
            Measurement(name, 200, need_several(run_on_all(words)))
            for name, words in RECIPES_ON_ALL.items()
        ),
    ],
)
