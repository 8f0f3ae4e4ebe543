from __future__ import annotations

from collections.abc import Callable

import pytest
from omegaconf import DictConfig

from lockstep_gpt.config import Config
from lockstep_gpt.launch import compose


def compose_words(*words: str) -> Config:
    """Return the configuration that words of the command line make."""
    made: list[Config] = []

    def job(config: DictConfig) -> None:
        made.append(compose.checked(config)[1])

    compose.run(list(words), job)
    return made[0]


@pytest.fixture(scope="session")
def composed() -> Callable[..., Config]:
    return compose_words
