"""What the receipt of a run tells of its model's size."""

from __future__ import annotations

from typing import Any

from lightning import Callback

from lockstep_gpt.config import Config
from lockstep_gpt.extras.cluster.law import block_weights, departures, expected
from lockstep_gpt.extras.cluster.size_settings import SizeSettings
from lockstep_gpt.run.directory import RunDirectory, some_of


class SizeLines(Callback):
    """Tells what follows from a model's size."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def receipt_lines(self) -> dict[str, str]:
        """Return the size, and the expected loss."""
        model = self.config.model
        chosen = SizeSettings.of(self.config).weights
        size = f"{chosen}: {block_weights(self.config):,} weights in blocks of width {model.n_embd}"
        others = departures(self.config)
        if others:
            return {"size": f"{size}; not set by its rules: {some_of(others)}"}
        loss = expected(self.config)
        if loss is None:
            return {"size": size}
        line = f"validation loss {loss['val_loss']:.4f} nats per token, {loss['basis']}"
        return {"size": size, "expected": line}


def callbacks(
    config: Config, _directory: RunDirectory, _rank: int, _terminal: Any
) -> list[Callback]:
    """Return the callback of a model whose size is set."""
    return [SizeLines(config)] if SizeSettings.of(config).weights is not None else []
