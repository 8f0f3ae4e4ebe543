"""Stages H and I: several GPUs of one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable

from measuring import PROGRAMS, Failure, Job, Measurement, Skip, Stage
from timed_runs import command, new_folder, refuse_different, smoke, speed
from works import checked_backend

GPT2 = "experiment=gpt2_124m"
SAMPLES = 8  # of a step of the smoke experiment: ranks must divide it
BATCH = 512  # samples of a step, the same for any number of devices: that of the recipes
# Slower, but atomic additions in other kernels may round in another order.
EXACT = "+trainer.deterministic=true"


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


def scaling(job: Job) -> None:
    """Measure the speed on one device and on all, with the same batch."""
    alone = 0.0
    for devices in (1, device_counts(job.hour.devices)[1]):
        place = [f"trainer.devices={devices}", "strategy=ddp", "max_steps=12"]
        run = speed(job, GPT2, *place, name=str(devices), batch=BATCH)
        alone = alone or run.tokens_per_second
        efficiency = run.tokens_per_second / devices / alone
        name = f"{devices} device{'s' if devices > 1 else ''}"
        notes = run.receipt("strategy")
        job.say(f"{run.speed()}; efficiency {efficiency:.1%}", name, notes=notes)


def sharded(job: Job) -> None:
    """Measure a recipe's speed on all devices, with shards of the model."""
    devices = device_counts(job.hour.devices)[1]
    place = [f"trainer.devices={devices}", "strategy=fsdp2", "max_steps=12"]
    run = speed(job, GPT2, *place, batch=BATCH)
    job.say(run.speed(), notes=run.receipt("strategy"))


WORKS = Stage(
    "H",
    "Several GPUs: does it work?",
    150,
    [
        Measurement("equal bits on 1 and several", 75, need_several(keep_the_bits)),
        Measurement("kill -9 of a rank", 90, need_several(survive_a_kill)),
        Measurement("torchrun, default backend", 60, need_several(join_torchrun)),
        Measurement("SyncBatchNorm", 30, need_several(synchronize_batchnorm)),
    ],
)
SPEED = Stage(
    "I",
    "Several GPUs: how fast?",
    150,
    [
        Measurement("gpt2_124m, ddp", 130, need_several(scaling)),
        Measurement("gpt2_124m, fsdp2", 90, need_several(sharded)),
    ],
)
