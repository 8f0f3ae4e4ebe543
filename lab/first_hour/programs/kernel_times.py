"""The time of each kernel, from torch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# Spans that the profiler reports next to the kernels in them.
NO_KERNELS = ("## Call CompiledFxGraph", "Optimizer.", "Torch-Compiled Region", "ProfilerStep")
# Words in the names of kernels, in lower case; the first kind that has one of a name's is its kind.
# A kernel of Inductor names what it fuses, also an attention that it only copies from.
KINDS = {
    "compiled reductions": ("triton_red", "triton_per", "triton_mix"),
    "compiled elementwise": ("triton_poi", "triton_for"),
    "attention": ("flash", "fmha", "sdpa", "attention", "cudnn_generated"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitkreduce", "xmma", "triton_tem"),
    "torch's elementwise": ("elementwise", "multi_tensor", "fill", "memset", "memcpy", "copy"),
    "collectives": ("nccl",),
}
OTHER = "other"


def new_profile() -> Any:
    """Return a profiler of the device's kernels; without a GPU, of the host's operations."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


class KernelTimes:
    """What a profile says about some runs of the same work.

    Args:
        profiled: a profiler that has ended.
        runs: how often the work was done.
    """

    def __init__(self, profiled: Any, runs: int) -> None:
        device = DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
        kernels = [
            event
            for event in profiled.events()
            if event.device_type == device
            and not event.is_user_annotation
            and not event.name.startswith(NO_KERNELS)
        ]
        spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
        self._runs = runs
        self._busy = 0.0  # microseconds with at least one kernel
        end = spans[0][0]
        for start, stop in spans:
            self._busy += max(0.0, stop - max(start, end))
            end = max(end, stop)
        self._whole = end - spans[0][0]
        self._micros: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        for event in kernels:
            self._micros[event.name] += event.time_range.end - event.time_range.start
            self._calls[event.name] += 1

    def figures(self, unit: str) -> str:
        """Return the time of a run, which the text calls `unit`, and how busy the device was."""
        milliseconds = self._whole / self._runs / 1e3
        return (
            f"{milliseconds:.2f} ms per {unit}, device busy {self._busy / self._whole:.1%}, "
            f"{self._calls.total() / self._runs:.0f} kernels per {unit}"
        )

    def kinds(self) -> str:
        """Return the milliseconds of a run by kind of kernel, the longest first."""
        by_kind: Counter[str] = Counter()
        for name, micros in self._micros.items():
            by_kind[kind_of(name)] += micros
        return ", ".join(
            f"{kind} {micros / self._runs / 1e3:.2f} ms" for kind, micros in by_kind.most_common()
        )

    def lines(self) -> list[str]:
        """Return a line for each kernel, the longest first."""
        lines = []
        for name, micros in self._micros.most_common():
            figures = f"{micros / self._runs / 1e3:9.3f} ms  {micros / self._busy:6.1%}"
            lines.append(f"{figures}  {self._calls[name] / self._runs:7.1f} x  {name[:120]}")
        return lines


def kind_of(kernel: str) -> str:
    """Return what kind of work a kernel does, by its name."""
    lower = kernel.lower()
    for kind, words in KINDS.items():
        if any(word in lower for word in words):
            return kind
    return OTHER


def profiled(work: Callable[[], Any], runs: int) -> KernelTimes:
    """Profile some runs of `work`."""
    with new_profile() as profile_of_runs:
        for _ in range(runs):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return KernelTimes(profile_of_runs, runs)
