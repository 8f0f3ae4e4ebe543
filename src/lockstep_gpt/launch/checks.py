"""Settings that exclude each other, and settings that these devices can't do.

Both are checked once, in the parent, before anything is created or torch is imported.
"""

from lockstep_gpt.config import Config
from lockstep_gpt.distributed import tensor_sizes
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import (
    refused_callbacks,
    targets,
    variables,
)
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.model.shape import VOCAB_MULTIPLE
from lockstep_gpt.registry import CHECK, additions
from lockstep_gpt.settings import as_typed, check, check_choice, check_switch

# `strategy._target_` of our choices. The module itself imports torch.
AUTO = "lockstep_gpt.distributed.strategies.auto"
DDP = "lockstep_gpt.distributed.strategies.ddp"
FSDP2 = "lockstep_gpt.distributed.strategies.fsdp2"
GROUPS_OF_GPT = ("model", "optim", "packing")
OF_GPT = ("batch.reference_size", "peak_tflops")
SHARD_DTYPES = ("float32", "bfloat16")
SHARDABLE = ("adamw", "muon")  # optimizers that update shards


def refuse_conflicts(config: Config) -> None:
    """Raise a `UserError` for settings that can't be combined on any device."""
    bucket_mb = config.strategy.get("bucket_cap_mb", 1)  # torch can't split graphs by less
    rule = "is too small for compile=true; set 1 or more, or compile=false"
    check("strategy.bucket_cap_mb", bucket_mb, not config.compile or bucket_mb >= 1, rule)
    fits = config.strategy.get("comm_hook") != "powersgd" or not config.launch.max_restarts
    rule = "accumulates an error that no checkpoint contains; set launch.max_restarts=0"
    check("strategy.comm_hook", "powersgd", fits, rule)
    if config.batch.exact_micro_size is not None:
        _refuse_other_sums(config)
    if config.strategy.get("_target_") == FSDP2:
        _refuse_unshardable(config)
    targets.refuse_mistakes_in(config)
    refused_callbacks.refuse_other_experiments(config)
    for check_config in additions(CHECK):
        check_config(config)


def refuse_settings_of_gpt(config: Config, words: list[str]) -> None:
    """Raise a `UserError` for a typed setting of the GPT that a module of the user's ignores.

    What an experiment's file sets for the GPT is no mistake: it has no effect.

    Args:
        config: of the run.
        words: the command's overrides.
    """
    if config.trains_gpt:
        return
    target = config.module["_target_"]
    has_windows = config.tokens_per_sample is not None  # of our token data
    for word in words:
        name = word.lstrip("+~").partition("=")[0].partition("@")[0]
        of_windows = name == "model.block_size" or name.partition(".")[0] == "packing"
        is_of_gpt = name in OF_GPT or name.partition(".")[0] in GROUPS_OF_GPT
        if is_of_gpt and not (of_windows and has_windows):
            raise UserError(
                f"{word} is for module=gpt; {target} takes its own arguments, as module.NAME=VALUE"
            )


def _refuse_other_sums(config: Config) -> None:
    """Raise a `UserError` for settings that would add gradients in another order."""
    remedy = "adds gradients in rank order; set batch.exact_micro_size=null, or"
    for name, needed in (("comm_hook", "none"), ("find_unused_parameters", False)):
        value = config.strategy.get(name, needed)
        rule = f"{remedy} strategy.{name}={as_typed(needed)}"
        check(f"strategy.{name}", value, value == needed, rule)
    target = config.strategy.get("_target_", AUTO)
    check("strategy._target_", target, target in (AUTO, DDP), f"{remedy} strategy=ddp")
    synchronized = config.trainer.get("sync_batchnorm", False)
    rule = f"{remedy} trainer.sync_batchnorm=false"
    check("trainer.sync_batchnorm", synchronized, not synchronized, rule)


def _refuse_unshardable(config: Config) -> None:
    """Raise a `UserError` for settings that `strategy=fsdp2` does not support."""
    strategy = config.strategy
    if config.trains_gpt:
        _refuse_unsplittable(config)
    rule = "splits the GPT only; set 1"
    splits = config.tensor_parallel > 1
    check("strategy.tensor_parallel", config.tensor_parallel, config.trains_gpt or not splits, rule)
    check_choice("strategy.param_dtype", strategy["param_dtype"], SHARD_DTYPES)
    check_choice("strategy.reduce_dtype", strategy["reduce_dtype"], SHARD_DTYPES)
    check_switch("strategy.reshard_after_forward", strategy["reshard_after_forward"])
    check_switch("strategy.reduce_each", strategy.get("reduce_each", False))
    fits = config.precision in ("32-true", "bf16-mixed")
    rule = "does not work with strategy=fsdp2; set 32-true or bf16-mixed, or ddp"
    check("precision", config.precision, fits, rule)
    fits = config.optim.algorithm in SHARDABLE
    rule = "does not work with strategy=fsdp2; set optim=adamw or muon, or ddp"
    check("optim.algorithm", config.optim.algorithm, fits or not config.trains_gpt, rule)
    synchronized = config.trainer.get("sync_batchnorm", False)
    rule = "does not work with fsdp2; set strategy=ddp"
    check("trainer.sync_batchnorm", synchronized, not synchronized, rule)
    if strategy["param_dtype"] == "bfloat16" and config.precision != "bf16-mixed":
        raise UserError(
            f"strategy.param_dtype=bfloat16 with precision={config.precision}; "
            "set precision=bf16-mixed, or param_dtype=float32"
        )
    if strategy["save_parts"] and config.checkpoint.background:
        raise UserError(
            "strategy.save_parts=true and checkpoint.background=true conflict; set one to false"
        )


def _refuse_unsplittable(config: Config) -> None:
    """Raise a `UserError` for a model that `strategy.tensor_parallel` can't split."""
    model = config.model
    counts = {
        f"model.n_head={model.n_head}": model.n_head,
        f"model.n_kv_head={model.n_kv_head}": model.n_kv_head or model.n_head,
        f"model.ngram_rows={model.ngram_rows}": model.ngram_rows,
        f"{VOCAB_MULTIPLE}, to whose multiples the vocabulary is padded": VOCAB_MULTIPLE,
    }
    tensor_sizes.refuse_unsplittable(
        config.tensor_parallel, model.architecture, counts, saves_parts=config.saves_parts
    )


def refuse_impossible(config: Config, placement: Placement) -> None:
    """Raise a `UserError` for what these devices, or variables of this machine, can't do."""
    variables.refuse_absent_interfaces(placement)
    backend = config.strategy.get("process_group_backend")
    has_gpus = placement.accelerator == "cuda"
    if has_gpus and config.tensor_parallel > 1:
        tensor_sizes.refuse_unequal_noise(config.tensor_parallel, config.model.dropout)
    uses = f"but this run uses {placement.accelerator}"
    rule = f"needs a GPU, {uses}; set precision=bf16-mixed or 32-true"
    check("precision", config.precision, has_gpus or config.precision != "16-mixed", rule)
    rule = f"needs GPUs, {uses}; set strategy.process_group_backend=gloo"
    check("strategy.process_group_backend", backend, has_gpus or backend != "nccl", rule)
    hook = config.strategy.get("comm_hook")
    fits = hook != "bf16" or (has_gpus and backend in (None, "nccl"))
    rule = "needs GPUs and NCCL; set strategy.comm_hook=fp16 or none"
    check("strategy.comm_hook", hook, fits, rule)
    synchronized = config.trainer.get("sync_batchnorm", False)
    fits = not synchronized or has_gpus or placement.world_size == 1
    rule = f"needs GPUs, {uses}: torch synchronizes BatchNorm only there; set it to false"
    check("trainer.sync_batchnorm", synchronized, fits, rule)
