"""The receipt: what a run will do, printed before its first step."""

from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from torch import nn

from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config
from lockstep_gpt.distributed.ddp import has_bucket_copies
from lockstep_gpt.distributed.ranks import backend_here
from lockstep_gpt.run.callbacks.step import InReceipt
from lockstep_gpt.schedule import Schedule, scaled_lr
from lockstep_gpt.settings import counted
from lockstep_gpt.tokens.datamodule import TokenDataModule
from lockstep_gpt.tokens.packing import packing_of
from lockstep_gpt.torch_patches import BatchNorm
from lockstep_gpt.training.building import parameters_of

RULES = {"linear": "linear in the batch", "sqrt": "square root of the batch", "none": "not scaled"}


def receipt_lines(
    config: Config,
    batch: Batch,
    tokens_per_sample: int,
    schedule: Schedule | None,
    epochs: float | None,
    facts: dict[str, str],
    details: dict[str, str],
) -> dict[str, str]:
    """Return label -> line.

    Args:
        config: of the run.
        batch: how a step's samples are spread.
        tokens_per_sample: 0 if samples have none.
        schedule: of the rate; None if the module decides it.
        epochs: passes over the data; None if the data module doesn't say.
        facts: lines that only the running rank knows.
        details: lines of callbacks.
    """
    compiled = ", compiled" if config.compile else ""
    tokens = batch.global_size * tokens_per_sample
    unit, size = ("token", tokens) if tokens else ("sample", batch.global_size)

    def in_steps(count: int) -> str:
        return f"{counted(count, 'step')} = {counted(count * size, unit)}"

    lines = {
        "run": f"{config.run_name} in {config.run_dir}",
        **facts,
        "precision": config.precision + compiled,
        "batch": f"{batch.ranks} x "
        f"{counted(batch.micro_size, 'sample')} x {batch.accumulation} accumulation = "
        f"{counted(batch.global_size, 'sample')}"
        + (f" = {tokens:,} tokens per step" if tokens else " per step"),
        "sums": batch.receipt_lines()["sums"],
        **details,
        "budget": in_steps(config.max_steps) + _in_epochs(epochs),
    }
    if schedule is None:
        return lines
    samples = f"{counted(batch.global_size, 'sample')}, tuned for {batch.reference_size}"
    rate, rule = config.optim.lr, config.optim.lr_scaling
    final = f"{schedule.lr(schedule.steps - 1):g}"
    decay = f"{schedule.decay} decay over the last {in_steps(schedule.decay_steps)} to {final}"
    return {
        **lines,
        "lr": f"{rate:g} x {scaled_lr(1.0, batch, rule):g} = {schedule.peak:g} "
        f"({RULES[rule]}: {samples})",
        "schedule": f"{in_steps(schedule.warmup_steps)} of warmup, "
        + ("then constant" if schedule.decay == "constant" else decay),
    }


def _in_epochs(epochs: float | None) -> str:
    """Return the length of a run in epochs; empty if the data module doesn't say."""
    if epochs is None:
        return ""
    count = times(epochs)
    unit = "epoch" if count == "1" else "epochs"
    return f" = {count} {unit}"


def times(epochs: float) -> str:
    """Return the number of epochs to two digits, or whole from 100 on."""
    return f"{epochs:,.0f}" if epochs >= 99.5 else f"{epochs:.2g}"


def facts(
    config: Config, module: nn.Module, data: LightningDataModule, trainer: Trainer, products: str
) -> dict[str, str]:
    """Return the lines of the receipt that only the running rank knows.

    Args:
        config: of the run.
        module: the GPT, or the user's module.
        data: what makes the batches.
        trainer: is about to train.
        products: the library of float32 matrix products; empty if the module decides.
    """
    strategy = type(trainer.strategy).__name__
    if trainer.world_size > 1:
        strategy += f" over {backend_here()}"
        if has_bucket_copies(config.strategy, trainer.accumulate_grad_batches):
            strategy += ", plus memory for its buckets: 1 more gradient of all weights"
    if config.tensor_parallel > 1:
        replicas = trainer.world_size // config.tensor_parallel
        strategy += f", {replicas} data x {config.tensor_parallel} tensor parallel"
    return {
        **module_line(config, module),
        **data_lines(config, data),
        "devices": f"{trainer.world_size} x {config.trainer['accelerator']}, "
        f"{counted(torch.get_num_threads(), 'thread')} each",
        **({"products": f"float32 matrices by {products}"} if products else {}),
        "strategy": strategy,
        **batchnorm_line(config, module),
    }


def module_line(config: Config, module: nn.Module) -> dict[str, str]:
    """Return the receipt's line on what is trained."""
    if isinstance(module, LightningModule):
        size = parameters_of(module, is_gpt=False)
        return {"module": f"{config.module['_target_']}, {size:,} parameters"}
    model: Any = module
    return {
        "model": f"{model.num_parameters:,} parameters, vocabulary of {model.vocab_size:,} "
        f"tokens, context of {config.model.block_size}"
    }


def data_lines(config: Config, data: LightningDataModule) -> dict[str, str]:
    """Return the receipt's lines on the data and the windows."""
    if not isinstance(data, TokenDataModule):
        return {"data": f"{config.data._target_}, a data module of your own"}
    lines = {
        "data": f"{data.folder}, {data.train_windows:,} windows to train on, "
        f"{data.val_windows:,} to validate on"
    }
    packing = packing_of(config.packing._target_).describe(data.folder, data.block_size)
    if packing:
        lines["packing"] = packing
    return lines


def batchnorm_line(config: Config, model: nn.Module) -> dict[str, str]:
    """Return the receipt's line on SyncBatchNorm; empty if it is not set."""
    if not config.trainer.get("sync_batchnorm"):
        return {}
    count = sum(isinstance(module, BatchNorm) for module in model.modules())
    if count == 0:
        return {"batchnorm": "trainer.sync_batchnorm=true changes nothing: the model has none"}
    return {"batchnorm": f"{counted(count, 'layer')} synchronized over all ranks"}


def as_text(lines: dict[str, str]) -> str:
    """Lay the receipt out in two columns."""
    width = max(map(len, lines))
    return "\n".join(f"  {label:<{width}}  {line}" for label, line in lines.items())


def details_of_callbacks(trainer: Any) -> dict[str, str]:
    """Return what callbacks add to a run's receipt."""
    lines: dict[str, str] = {}
    for callback in trainer.callbacks:
        if isinstance(callback, InReceipt):
            lines |= callback.receipt_lines()
    return lines
