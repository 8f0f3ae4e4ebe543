from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.profiler import ProfilerActivity, profile


@pytest.fixture(scope="session")
def measured_peak() -> Callable[[Callable[[], object]], int]:
    """Return the most bytes that torch's allocator has given out during some work on the CPU."""

    def measure(work: Callable[[], object]) -> int:
        cpu = [ProfilerActivity.CPU]
        with profile(activities=cpu, profile_memory=True, acc_events=True) as report:  # no warning
            work()
        events = [event for event in report.profiler.kineto_results.events() if event.nbytes()]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    return measure
