"""The tables of `lockstep-gpt ledger`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from omegaconf import DictConfig

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster.chosen import Chosen
from lockstep_gpt.extras.cluster.hardware import GB, TERA, Hardware
from lockstep_gpt.extras.cluster.kernels import PARTS, UPDATES
from lockstep_gpt.extras.cluster.ledger import Ledger, ledger
from lockstep_gpt.extras.cluster.prediction import vocabulary
from lockstep_gpt.extras.cluster.table import shares
from lockstep_gpt.launch import compose
from lockstep_gpt.settings import counted
from lockstep_gpt.training.schedule import BatchPlan, plan_batch


def composed(words: DictConfig) -> tuple[Config, int]:
    """Return the configuration and its vocabulary size, which is GPT-2's if `plan` uses that."""
    config = compose.resolve_config(words)[1]
    return config, Chosen.now().vocabulary() or vocabulary(config.data)


def report(config: Config, vocab_size: int, devices: Sequence[Hardware]) -> Iterator[str]:
    """Yield the lines for one configuration."""
    batch = plan_batch(config.batch, config.model.block_size, 1, 1)
    micro_batches = counted(batch.accumulation, "micro-batch", "es")
    yield (
        f"{micro_batches} of {batch.micro_size} x {batch.block_size} tokens, "
        f"{config.precision}, compile={str(config.compile).lower()}, {vocab_size:,} ids\n"
    )
    books = [ledger(config, vocab_size, batch.micro_size, device.memory) for device in devices]
    pairs = sorted(zip(books, devices, strict=True), key=lambda pair: pair[0].moved)
    for _, same in groupby(pairs, key=lambda pair: pair[0].kernels):
        group = [*same]
        yield from [*table(group[0][0], batch, [device for _, device in group]), ""]
    for device in devices:
        yield f"{device.name}: {device.source}"
    yield f"assumed: {shares(devices[0])}; {devices[0].launch * 1e6:.2g} us to launch a kernel"


def table(book: Ledger, batch: BatchPlan, devices: Sequence[Hardware]) -> Iterator[str]:
    """Yield a line for each part, then the speeds."""
    names = "".join(f"{device.name + ' ms':>12}" for device in devices)
    yield f"{'part':<14}{'kernels':>8}{'GB read':>10}{'GB written':>12}{'TFLOP':>8}{names}"
    for part in PARTS:
        part_ledger = book.of(part)
        if not part_ledger.kernels:
            continue
        times = "".join(f"{part_ledger.seconds(device) * 1e3:12.2f}" for device in devices)
        read, written = part_ledger.total("read") / GB, part_ledger.total("written") / GB
        yield (
            f"{part:<14}{part_ledger.kernels.total():8}{read:10.2f}{written:12.2f}"
            f"{part_ledger.total('flops') / TERA:8.2f}{times}"
        )
    steps = [
        book.compute(batch.accumulation, device) + book.of(*UPDATES).seconds(device)
        for device in devices
    ]
    yield f"{'a step':<52}" + "".join(f"{seconds * 1e3:12.1f}" for seconds in steps)
    speeds = "".join(f"{batch.tokens_per_step / seconds:12,.0f}" for seconds in steps)
    yield f"{'tokens per second':<52}{speeds}"
    yield f"the host waits for the device {book.waits} times in a micro-batch and an update"
