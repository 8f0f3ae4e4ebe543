"""A plan on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby

from lockstep_gpt.extras.cluster.hardware import GB, TERA
from lockstep_gpt.extras.cluster.memory import Memory
from lockstep_gpt.extras.cluster.prediction import TOKENS_PER_PARAMETER, Plan, Row
from lockstep_gpt.extras.cluster.step_time import ring_seconds, simple_seconds

DAY = 86_400.0
UNITS = {"GB": GB, "MB": 1e6}
PARTS = [part.name for part in fields(Memory)]


def as_text(plan: Plan) -> str:
    """Lay out what the plan rests on, memory by part and time by part."""
    width = 12
    facts = [f"{label:<{width}}{line}" for label, line in _facts(plan)]
    blocks = ["\n".join(facts)]
    if plan.rows:
        unit = "GB" if plan.rows[0].memory.total >= GB else "MB"
        rows = _memory_rows(plan, UNITS[unit])
        memory = [f"memory of one device, {unit}", *_aligned([_MEMORY_HEAD, *rows])]
        time = ["one optimizer step, ms", *_aligned([_time_head(plan), *_time_rows(plan)])]
        blocks += ["\n".join(memory), "\n".join(time)]
    refused = [f"{devices} devices: {reason}" for devices, reason in plan.refused.items()]
    return "\n\n".join(filter(None, [*blocks, "\n".join(refused)]))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    device = plan.hardware
    yield (
        "model",
        f"{plan.parameters:,} parameters, vocabulary of {plan.vocab_size:,}, context of "
        f"{plan.block_size:,}, {plan.flops_per_token / GB:.3g} GFLOP per token",
    )
    yield (
        "device",
        f"{device.name}: {device.flops(plan.precision) / TERA:.4g} TFLOP/s in {plan.precision}, "
        f"{device.memory / GB:.4g} GB at {device.memory_bandwidth / GB:,.4g} GB/s",
    )
    yield (
        "links",
        f"{device.intra.name}, {device.intra.bandwidth / GB:.4g} GB/s, in nodes of "
        f"{device.devices_per_node}; {device.adapters} x {device.inter.name}, "
        f"{device.inter.bandwidth / GB:.4g} GB/s each, between them",
    )
    yield "source", device.source
    yield (
        "measured" if device.measured else "assumed",
        f"{device.utilisation:.3g} of the peak in forward and backward, "
        f"{device.link_efficiency:.2g} of the links' rate, "
        f"{device.context / GB:.2g} GB for the device's context",
    )
    yield "tokens", f"{plan.tokens:.4g}; {_chinchilla(plan)}"
    yield "all-reduce", _all_reduce(plan)
    for note in plan.notes:
        yield "note", note


def _chinchilla(plan: Plan) -> str:
    return (
        f"the Chinchilla point, {TOKENS_PER_PARAMETER} per parameter, is "
        f"{plan.chinchilla_tokens:.4g} (Hoffmann et al. 2022)"
    )


def _all_reduce(plan: Plan) -> str:
    size, device = plan.gradient_bytes, plan.hardware
    simple = simple_seconds(size, device.intra.bandwidth)
    ring = ring_seconds(size, device.devices_per_node, device.intra.bandwidth)
    return (
        f"{size / GB:.3g} GB of gradients over {device.intra.name}: {simple * 1e3:.3g} ms by "
        f"size / bandwidth, {ring * 1e3:.3g} ms by the ring of {device.devices_per_node}"
    )


_MEMORY_HEAD = ["devices", "micro", *PARTS, "total", "fits", "max micro"]


def _memory_rows(plan: Plan, unit: float) -> Iterator[list[str]]:
    """Yield a line for each stretch of rows with the same memory."""
    for _, group in groupby(plan.rows, key=lambda row: (row.memory, row.largest_micro_size)):
        rows = list(group)
        memory = rows[0].memory
        parts = [getattr(memory, part) for part in PARTS]
        yield [
            _span([row.batch.world_size for row in rows]),
            str(rows[0].batch.micro_size),
            *(f"{size / unit:.2f}" for size in (*parts, memory.total)),
            "yes" if rows[0].fits else "no",
            str(rows[0].largest_micro_size),
        ]


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _time_head(plan: Plan) -> list[str]:
    batch = ["devices", "micro x accum. = batch", "lr"]
    parts = ["compute", "optimizer", "data", "all-reduce", "exposed", "step"]
    price = [] if plan.rows[0].cost is None else ["cost"]
    return [*batch, *parts, "tokens/s", "efficiency", "days", *price]


def _time_rows(plan: Plan) -> Iterator[list[str]]:
    for row in plan.rows:
        time, batch = row.time, row.batch
        seconds = (time.compute, time.optimizer, time.data, time.all_reduce, time.exposed)
        yield [
            str(batch.world_size),
            f"{batch.micro_size} x {batch.accumulation} = {batch.global_size}",
            f"{row.lr:.3g}",
            *(_milliseconds(part) for part in (*seconds, time.total)),
            f"{row.tokens_per_second:,.0f}",
            f"{row.efficiency:.1%}",
            _days(row),
            *([] if row.cost is None else [f"{row.cost:,.0f}"]),
        ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _days(row: Row) -> str:
    days = row.seconds / DAY
    return f"{days:,.0f}" if days >= 100 else f"{days:.3g}"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
