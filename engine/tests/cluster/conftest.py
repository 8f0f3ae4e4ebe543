from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lockstep.cluster import memory


@pytest.fixture(scope="session")
def known() -> dict[str, int]:
    """The peaks that were traced."""
    return {}


@pytest.fixture
def traced_once(known: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a shape for the first prediction that needs it: its bytes depend on nothing else."""
    trace: Callable[..., int] = memory.trace_peak

    def trace_once(*arguments: Any) -> int:
        key = repr(arguments)
        if key not in known:
            known[key] = trace(*arguments)
        return known[key]

    monkeypatch.setattr(memory, "trace_peak", trace_once)
