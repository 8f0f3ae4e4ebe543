"""Format a plan for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from lockstep.plan.hardware import GB, TERA
from lockstep.plan.memory import Memory
from lockstep.plan.prediction import TOKENS_PER_PARAMETER, Plan
from lockstep.plan.step_time import ring_seconds, simple_seconds
from lockstep.settings import counted

# For each unit: the end of its range and its own length, both in seconds, and its name.
SPANS = ((1.0, 1e-3, "ms"), (100.0, 1.0, "s"), (6000.0, 60.0, "min"), (172_800.0, 3600.0, "h"))
DAY = 86_400.0
LARGE = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
UNITS = {"GB": GB, "MB": 1e6}
PARTS = [part.name for part in fields(Memory)]


def as_text(plan: Plan) -> str:
    """Format the plan's assumptions, memory by part, and time by part."""
    width = 12
    facts = [f"{label:<{width}}{line}" for label, line in _facts(plan)]
    blocks = ["\n".join(facts)]
    if plan.rows:
        unit = "GB" if plan.rows[0].memory.total >= GB else "MB"
        rows = _memory_rows(plan, UNITS[unit])
        memory = [f"memory of one device, {unit}", *_aligned([_memory_head(plan), *rows])]
        remedies = [*_remedies(plan, UNITS[unit], unit)]
        time = ["one optimizer step, ms", *_aligned([_time_head(plan), *_time_rows(plan)])]
        blocks += ["\n".join(lines) for lines in (memory, remedies, [*_NOT_MODELLED, *time])]
    refused = [f"{counted(count, 'device')}: {reason}" for count, reason in plan.refused.items()]
    return "\n\n".join(filter(None, [*blocks, "\n".join(refused)]))


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    device = plan.hardware
    yield "model", _model(plan)
    if plan.tokens and plan.tokens.vocabulary:
        yield "vocabulary", plan.tokens.vocabulary
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
        f"{device.utilisation:.3g} of the peak in forward and backward, but at least "
        f"{device.kernel_seconds * 1e6:.2g} us per kernel, {plan.kernels:,} in each micro-batch, "
        f"{device.memory_share:.2g} of the memory's rate in updates, "
        f"{device.link_efficiency:.2g} of the links' rate, "
        f"{device.context / GB:.2g} GB for the device's context, "
        f"{device.disk / GB:.2g} GB/s to the disk",
    )
    if plan.samples is not None:
        yield from _budget(plan, plan.samples)
    yield from _exchange(plan)
    yield from _pauses(plan)
    for note in plan.notes:
        yield "note", note


def _model(plan: Plan) -> str:
    size = f"{plan.parameters:,} parameters, "
    if plan.tokens is None:
        return f"{size}{plan.flops / GB:.3g} GFLOP per sample"
    flops = plan.flops / plan.tokens.per_sample
    return (
        f"{size}vocabulary of {plan.tokens.vocab_size:,}, context of {plan.tokens.per_sample:,}, "
        f"{flops / GB:.3g} GFLOP per token"
    )


def _budget(plan: Plan, samples: float) -> Iterator[tuple[str, str]]:
    if plan.tokens is None:
        yield "samples", amount(samples)
        return
    tokens = amount(samples * plan.tokens.per_sample)
    point = f"the Chinchilla point, {TOKENS_PER_PARAMETER} per parameter"
    ideal = amount(TOKENS_PER_PARAMETER * plan.parameters)
    source = "(Hoffmann et al. 2022)"
    if plan.tokens.budget:
        yield "tokens", f"{tokens}, {plan.tokens.budget}; {point}, is {ideal} {source}"
        return
    unset = "because neither the command nor its experiment sets max_steps"
    yield "tokens", f"{tokens}, {point} {source}, {unset}"


def _pauses(plan: Plan) -> Iterator[tuple[str, str]]:
    for row in plan.rows[-1:]:  # most devices, which have the largest share
        pauses = row.pauses
        if pauses is None:
            continue
        one = "of unknown length, because val_tokens is null"
        if pauses.validation is not None:
            one = f"of {pauses.validation:.2g} s"
        yield (
            "val+save",
            f"on {counted(row.batch.world_size, 'device')}: "
            f"{counted(pauses.validations, 'validation')} {one}, and "
            f"{counted(pauses.saves, 'save')} of {pauses.save:.2g} s, which aren't part of the "
            "time; each validation counts as the best so far, and at most one is saved per "
            "checkpoint.every steps",
        )


def _exchange(plan: Plan) -> Iterator[tuple[str, str]]:
    size = plan.gradient_bytes
    device = plan.hardware
    narrowest = (
        f"the narrowest link limits all devices: a device's {device.intra.name}, or all "
        f"{device.adapters} x {device.inter.name} of a node"
    )
    if not plan.buckets:
        yield (
            "fsdp2",
            "gathers each block while the one before computes, and scatters its gradients while "
            "the next does; the rest of the model, the ends, and Muon's exchange are exposed",
        )
        yield "efficiency", "can be above 100%, because ranks share the update too"
        yield "algorithm", f"NCCL's ring, (N - 1) / N of the bytes each time; {narrowest}"
        return
    simple = simple_seconds(size, device.intra.bandwidth)
    ring = ring_seconds(size, device.devices_per_node, device.intra.bandwidth)
    yield (
        "all-reduce",
        f"{size / GB:.3g} GB of gradients in {counted(plan.buckets, 'bucket')} over "
        f"{device.intra.name}: {simple * 1e3:.3g} ms by size / bandwidth, {ring * 1e3:.3g} ms by "
        f"the ring of {device.devices_per_node}",
    )
    yield (
        "algorithm",
        "the faster for each bucket, as NCCL chooses: a ring, 2 (N - 1) / N of the bytes in "
        "2 (N - 1) steps, or a double tree, 2 times the bytes in fewer steps",
    )
    yield "bottleneck", narrowest


_NOT_MODELLED = [
    "Each model and micro-batch is planned with the same utilization. Measure yours (doctor",
    "--save-profile), or set --utilisation.",
    "Efficiency counts only the time that ranks wait for links. It leaves out slow ranks, networks",
    "that are shared or narrower than their adapters, kernels slowed down by NCCL's, validation,",
    "saving (val+save), and restarts. These grow with the number of devices: measure before you",
    "trust a value near 100% for many.",
]


def _parts(plan: Plan) -> list[str]:
    """Return the parts of memory; rare ones only if this plan has them."""
    rare = ("buckets", "gathered", "sums")
    present = {part for part in rare for row in plan.rows if getattr(row.memory, part)}
    return [part for part in PARTS if part not in rare or part in present]


def _memory_head(plan: Plan) -> list[str]:
    return ["devices", "micro", *_parts(plan), "total", "fits", "max micro"]


def _memory_rows(plan: Plan, unit: float) -> Iterator[list[str]]:
    """Yield one line for each group of successive rows with the same memory."""
    for _, group in groupby(plan.rows, key=lambda row: (row.memory, row.largest_micro_size)):
        rows = list(group)
        memory = rows[0].memory
        parts = [getattr(memory, part) for part in _parts(plan)]
        yield [
            _range([row.batch.world_size for row in rows]),
            str(rows[0].batch.micro_size),
            *(f"{size / unit:.2f}" for size in (*parts, memory.total)),
            "yes" if rows[0].fits else "no",
            str(rows[0].largest_micro_size),
        ]


def _range(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]}-{numbers[-1]}"


def _remedies(plan: Plan, unit: float, name: str) -> Iterator[str]:
    """Yield what would fit, for each group of successive misfits with the same remedies."""
    misfits = [row for row in plan.rows if not row.fits]
    if misfits:
        yield f"does not fit; what would fit, in {name} per device"
    for _, group in groupby(misfits, key=lambda row: row.remedies):
        rows = list(group)
        devices = _range([row.batch.world_size for row in rows])
        fitting = [f"{remedy.words} {remedy.memory / unit:.2f}" for remedy in rows[0].remedies]
        none = "nothing that plan knows: use more devices, larger ones, or a smaller model"
        yield f"{devices:>7}  {'; or '.join(fitting) or none}"


def _time_head(plan: Plan) -> list[str]:
    exchange = "all-reduce" if plan.buckets else "gather+scatter"
    parts = ["compute", "optimizer", "data", exchange, "by", "exposed", "step"]
    unit = "tokens/s" if plan.tokens else "samples/s"
    return [
        *("devices", "micro x accum. = batch"),
        *_if(plan.rows[0].lr, "lr"),
        *(*parts, unit, "efficiency"),
        *_if(plan.rows[0].seconds, "time"),
        *_if(plan.rows[0].pauses, "val+save"),
        *_if(plan.rows[0].cost, "cost"),
    ]


def _if(value: Any, *cells: str) -> tuple[str, ...]:
    """Return the cells of a column that a plan has only with this value."""
    return () if value is None else cells


def _time_rows(plan: Plan) -> Iterator[list[str]]:
    per_sample = plan.tokens.per_sample if plan.tokens else 1
    for row in plan.rows:
        time = row.time
        batch = row.batch
        cells = [
            str(batch.world_size),
            f"{batch.micro_size} x {batch.accumulation} = {batch.global_size}",
        ]
        if row.lr is not None:
            cells.append(f"{row.lr:.3g}")
        cells += map(_milliseconds, (time.compute, time.optimizer, time.data, time.all_reduce))
        cells.append(time.algorithm or "-")
        cells += map(_milliseconds, (time.exposed, time.total))
        cells += [f"{row.samples_per_second * per_sample:,.0f}", f"{row.efficiency:.1%}"]
        if row.seconds is not None:
            cells.append(span(row.seconds))
            if row.pauses is not None:
                cells.append(f"{row.pauses.share(row.seconds):.1%}")
        if row.cost is not None:
            cells.append(_cost(row.cost))
        yield cells


def amount(count: float) -> str:
    """Format a number with million, billion, or trillion where it is large enough."""
    for size, name in LARGE:
        if count >= size:
            return f"{count / size:,.4g} {name}"
    return f"{count:,.0f}"


def span(seconds: float) -> str:
    """Format a time in the unit in which it is a small number."""
    for most, length, unit in SPANS:
        if seconds < most:
            number = max(0.01, seconds / length)
            digits = ".0f" if number >= 10 else ".2g"
            return f"{number:{digits}} {unit}"
    days = seconds / DAY
    digits = ",.0f" if days >= 10 else ".1f"
    return f"{days:{digits}} days"


def _milliseconds(seconds: float) -> str:
    if 0 < seconds < 1e-6:
        return "<0.001"
    digits = ",.0f" if seconds >= 0.1 else ".3g"
    return f"{seconds * 1e3:{digits}}"


def _cost(cost: float) -> str:
    if 0 < cost < 0.01:
        return "<0.01"
    digits = ",.0f" if cost >= 100 else ".2f"
    return f"{cost:{digits}}"


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
