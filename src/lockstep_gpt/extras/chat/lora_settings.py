"""Settings of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep_gpt.config import Config
from lockstep_gpt.settings import ExtraSettings, setting


@dataclass
class LoraSettings(ExtraSettings):
    """LoRA adapters, which are trained instead of the weights."""

    node: ClassVar[str] = "lora"
    on_resume: ClassVar[str] = "kept"
    rank: int | None = setting(
        "rank of the LoRA adapters to train; null: train all weights", None, at_least=1
    )
    alpha: float | None = setting(
        "the adapters are multiplied by alpha / rank; null: twice the rank", None, above=0
    )

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        assert self.rank is not None
        if self.alpha is None:
            return 2.0
        return self.alpha / self.rank


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` for settings that adapters can't work with."""
    lora = LoraSettings.of(config)
    if lora.rank is None:
        if lora.alpha is not None:
            lora.refuse("alpha", "needs lora.rank; set that too")
        return
    if config.model.init_from is None:
        lora.refuse("rank", "needs model.init_from, the weights it adapts")
    if "fsdp" in str(config.strategy.get("_target_", "")).lower():
        lora.refuse("rank", "needs a strategy with whole models, such as ddp")
