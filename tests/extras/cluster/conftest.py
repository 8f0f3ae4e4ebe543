from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster import memory
from lockstep_gpt.launch import compose


def compose_words(*words: str) -> Config:
    """Return the configuration that words of the command line make."""
    made: list[Config] = []

    def job(config: DictConfig) -> None:
        made.append(compose.checked(config)[1])

    compose.run(list(words), job)
    return made[0]


@pytest.fixture(scope="session")
def known() -> dict[str, int]:
    """The bytes of what has been traced."""
    return {}


@pytest.fixture
def traced_once(known: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace a shape for the first prediction that needs it: its bytes depend on nothing else."""
    trace = memory.trace_peak

    def once(*shape: Any) -> int:
        key = repr(shape)
        if key not in known:
            known[key] = trace(*shape)
        return known[key]

    monkeypatch.setattr(memory, "trace_peak", once)


@pytest.fixture(scope="session")
def composed() -> Callable[..., Config]:
    return compose_words
