"""Settings of the optimizer and of the learning rate, and the optimizer of such settings."""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from lockstep_gpt.errors import defined_in
from lockstep_gpt.schedule import DECAYS, SCALINGS
from lockstep_gpt.settings import Checked, is_module, setting


@dataclass
class OptimConfig(Checked):
    """The optimizer and its learning rate over the run."""

    node: ClassVar[str] = "optim"
    algorithm: str = setting("adamw, muon, or another module of training/", on_resume="kept")
    lr: float = setting("peak learning rate at batch.reference_size", 1e-3, above=0)
    head_lr_fraction: float = setting("muon: the head's rate as a fraction of lr", 0.2, above=0)
    lr_scaling: str = setting(
        "how the peak grows with the global batch", "linear", choices=SCALINGS
    )
    warmup_steps: int | None = setting(
        "steps of linear warmup; a tenth of a run that is no longer", None, at_least=0
    )
    decay: str = setting(
        "the rate after warmup; wsd keeps the peak, then falls linearly", "cosine", choices=DECAYS
    )
    decay_fraction: float = setting("fraction of steps in which wsd falls", 0.2, above=0, at_most=1)
    final_lr_fraction: float = setting(
        "learning rate at the end, as a fraction of the peak", 0.1, at_least=0, at_most=1
    )
    beta1: float = setting("decay of the mean of gradients", 0.9, at_least=0, below=1)
    beta2: float = setting("decay of the mean of squared gradients", 0.95, at_least=0, below=1)
    eps: float = setting("added to Adam's denominator", 1e-8, above=0)
    weight_decay: float = setting("decoupled weight decay, of matrices only", 0.1, at_least=0)
    clip_norm: float | None = setting("largest gradient norm; null: no clipping", 1.0, above=0)

    def __post_init__(self) -> None:
        """Also check that the optimizer exists."""
        super().__post_init__()
        if self.algorithm != "adamw" and not is_module("training", self.algorithm):
            self.refuse("algorithm", "is not adamw, muon, or another module of training/")


def optimizer_of(config: OptimConfig) -> Callable[..., Any]:
    """Return the optimizer's function, with the settings that it has arguments for.

    It still needs named weights and the scaled rate. `adamw` and `muon` are in optim.py; the
    function of another module of training/ has the module's name.
    """
    name = config.algorithm
    file = "optim" if name in ("adamw", "muon") else name
    module = importlib.import_module(f"{__package__}.{file}")
    function = defined_in(module, name, "training/optim.py")
    accepted = inspect.signature(function).parameters
    settings = {key: value for key, value in vars(config).items() if key in accepted}
    settings.pop("lr", None)  # the caller's is scaled
    return partial(function, **settings)
