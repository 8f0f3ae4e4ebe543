"""The expected final loss of a size: a power law fitted to runs of five sizes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.cluster.rules import rules, weights
from lockstep_gpt.extras.cluster.size_settings import SizeSettings
from lockstep_gpt.settings import as_typed, counted

OURS = Path(__file__).with_name("law.json")
EXPONENTS = np.arange(0.02, 1.0, 0.002)


@dataclass(frozen=True)
class Law:
    """`floor + factor x weights ^ -exponent`, in nats per token (Hoffmann et al. 2022, eq. 2)."""

    floor: float
    factor: float
    exponent: float

    def loss(self, count: float) -> float:
        """Return the validation loss of a model with `count` weights in its blocks."""
        return float(self.floor + self.factor * count**-self.exponent)


def fitted(counts: Sequence[float], losses: Sequence[float]) -> Law:
    """Return the least-squares law, in relative errors, with a floor of at least 0."""
    x = np.asarray(counts, float)
    y = np.asarray(losses, float)

    def fit_with(exponent: float) -> tuple[float, Law]:
        power = x**-exponent
        floor, factor = np.linalg.lstsq(np.stack([1 / y, power / y], 1), np.ones_like(y))[0]
        if floor < 0:
            floor = 0.0
            factor = (power / y).sum() / (power**2 / y**2).sum()
        law = Law(float(floor), float(factor), float(exponent))
        return float((((floor + factor * power) / y - 1) ** 2).sum()), law

    _, best = min(map(fit_with, EXPONENTS), key=lambda fit: fit[0])
    return best


def left_out(counts: Sequence[float], losses: Sequence[float]) -> float:
    """Return the loss of the last, largest size, predicted by the law of all the others."""
    return fitted(counts[:-1], losses[:-1]).loss(counts[-1])


def expected(config: Config) -> dict[str, Any] | None:
    """Return the expected final loss of a run by the rules, and its basis; None if unknown.

    Raise a `UserError` if the file of `size.law` can't be read.
    """
    size = SizeSettings.of(config)
    if size.weights is None or departures(config):
        return None
    content = _read(Path(size.law) if size.law else OURS)
    if not content["is_valid"] or content["source"] != config.data.kind:
        return None
    law = Law(content["floor"], content["factor"], content["exponent"])
    seen = [run["weights"] for run in content["runs"]]
    count = block_weights(config)
    verb = "interpolated" if min(seen) <= count <= max(seen) else "extrapolated"
    runs = f"{counted(len(seen), 'run')} of {min(seen):,} to {max(seen):,} weights"
    return {"val_loss": law.loss(count), "basis": f"{verb} from {runs}"}


def departures(config: Config) -> list[str]:
    """Name the settings that differ from those that follow from the size."""
    departing = []
    size = SizeSettings.of(config).weights
    for name, value in rules(str(size), config.model.block_size).items():
        group, _, key = name.rpartition(".")
        settings = getattr(config, group) if group else config
        setting = getattr(settings, key)
        if setting != value:
            departing.append(f"{name}={as_typed(setting)}")
    return departing


def block_weights(config: Config) -> int:
    """Return the weights in the blocks of a run's model."""
    return weights(config.model.n_layer, config.model.n_embd)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"size.law={path} cannot be read ({error}); use a file that size_law has written"
        ) from None
