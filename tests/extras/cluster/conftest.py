from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster import ledger, memory


@pytest.fixture(scope="session")
def known() -> dict[str, Any]:
    """The bytes and ledgers that were traced."""
    return {}


@pytest.fixture
def traced_once(known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a shape for the first prediction that needs it: its bytes depend on nothing else."""
    for module, name in ((memory, "trace_peak"), (ledger, "trace")):
        monkeypatch.setattr(module, name, partial(_once, known, getattr(module, name)))


def _once(known: dict[str, Any], trace: Callable[..., Any], *arguments: Any) -> Any:
    words = [
        (argument.precision, argument.compile, argument.optim)
        if isinstance(argument, Config)
        else argument
        for argument in arguments
    ]
    key = f"{trace.__name__} {words}"
    if key not in known:
        known[key] = trace(*arguments)
    return known[key]
