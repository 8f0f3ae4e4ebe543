"""Check before torch is imported whether `strategy=fsdp2` supports the settings."""

from __future__ import annotations

from lockstep_gpt.config import Config, UserError, check_choice, check_switch

DTYPES = ("float32", "bfloat16")


def refuse_impossible(config: Config) -> None:
    """Raise a `UserError` if the run uses fsdp2 with a setting that it does not support."""
    strategy = config.strategy
    if not str(strategy.get("_target_")).endswith(".sharding.fsdp2.fsdp2"):
        return
    check_choice("strategy.param_dtype", strategy["param_dtype"], DTYPES)
    check_choice("strategy.reduce_dtype", strategy["reduce_dtype"], DTYPES)
    check_switch("strategy.reshard_after_forward", strategy["reshard_after_forward"])
    check_switch("strategy.reduce_each", strategy.get("reduce_each", False))
    if config.precision not in ("32-true", "bf16-mixed"):
        config.refuse(
            "precision", "does not work with strategy=fsdp2; set 32-true or bf16-mixed, or ddp"
        )
    if config.optim.algorithm != "adamw":
        config.optim.refuse(
            "algorithm", "does not work with strategy=fsdp2; set optim=adamw, or ddp"
        )
    if config.trainer.get("sync_batchnorm"):
        raise UserError("trainer.sync_batchnorm=true does not work with fsdp2; set strategy=ddp")
    if strategy["param_dtype"] == "bfloat16" and config.precision != "bf16-mixed":
        raise UserError(
            f"strategy.param_dtype=bfloat16 with precision={config.precision}; "
            "set precision=bf16-mixed, or param_dtype=float32"
        )
    if strategy["save_parts"] and getattr(config.checkpoint, "background", False):
        raise UserError(
            "strategy.save_parts=true and checkpoint.background=true conflict; set one to false"
        )
