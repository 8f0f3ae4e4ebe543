"""Settings of adapters in `model`."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep_gpt.config import Config, ModelConfig, check, setting


@dataclass
class AdaptedModel(ModelConfig):
    """LoRA adapters, which are trained instead of the weights."""

    lora_rank: int | None = setting(
        "rank of the LoRA adapters to train; null: train all weights", None, at_least=1
    )
    lora_alpha: float | None = setting(
        "the adapters are multiplied by lora_alpha / lora_rank; null: twice the rank", None, above=0
    )


def refuse(config: Config) -> None:
    """Raise a `UserError` for settings that adapters can't work with."""
    model: ModelConfig = config.model
    rank = getattr(model, "lora_rank", None)
    if rank is not None:
        given = getattr(model, "init_from", None) is not None
        check("model.lora_rank", rank, given, "needs model.init_from, the weights it adapts")
        whole = "fsdp" not in str(config.strategy.get("_target_", "")).lower()
        check("model.lora_rank", rank, whole, "needs a strategy with whole models, such as ddp")
    elif getattr(model, "lora_alpha", None) is not None:
        check("model.lora_alpha", getattr(model, "lora_alpha", None), False, "needs lora_rank")
