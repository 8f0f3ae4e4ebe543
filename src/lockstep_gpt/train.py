"""One run: on this machine's devices, under torchrun or srun, or on several machines."""

import lockstep
import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lockstep.errors import UserError
from lockstep.settings import check_whole
from omegaconf import DictConfig

from lockstep_gpt import CONFIGS
from lockstep_gpt.initial_weights import load_initial_weights
from lockstep_gpt.module import GPTModule, count_targets


def build(
    cfg: DictConfig, run: lockstep.Run
) -> tuple[LightningModule, LightningDataModule, Trainer]:
    """Return what Lightning trains with; a notebook calls this with `lockstep.Run.alone()`."""
    check_whole("seed", cfg.seed)
    tensor_parallel = cfg.strategy.get("tensor_parallel", 1)  # ranks that share samples
    size = run.recall("global_size")  # of a batch that grew with the devices of the first start
    batch = lockstep.build(cfg.batch, global_size=size).spread_over(run.ranks, 1, tensor_parallel)
    if batch.grows:
        run.remember("global_size", batch.global_size)
    data = lockstep.build(cfg.data, batch=batch, seed=cfg.seed, run=run)
    peak = lockstep.scaled_lr(cfg.optim.lr, batch, cfg.lr_scaling)
    schedule = lockstep.build(cfg.schedule, steps=cfg.max_steps, peak=peak)
    torch.manual_seed(cfg.seed)  # all ranks draw the same initial weights
    known = {"schedule": schedule, "compiled": cfg.compile}
    if hasattr(data, "vocab_size"):
        known["vocab_size"] = data.vocab_size
    module = lockstep.build(cfg.module, **known)
    if not isinstance(module, LightningModule):
        name = cfg.module["_target_"]
        raise UserError(f"module._target_={name} names no LightningModule; set one")
    is_scheduled = getattr(module, "schedule", None) is schedule  # yours may have rates of its own
    peak_lr = {"peak_lr": peak} if is_scheduled else {}
    if cfg.init_from is not None and not run.has_begun:
        load_initial_weights(cfg.init_from, module, data)
    counting = [lockstep.CountTargets(count_targets)] if getattr(data, "may_ignore", False) else []
    trainer = lockstep.build(
        cfg.trainer,
        accumulate_grad_batches=batch.accumulation,
        max_steps=cfg.max_steps,
        precision=cfg.precision,
        log_every_n_steps=cfg.log_every,
        strategy=lockstep.build(cfg.strategy, batch=batch),  # adds gradients
        logger=run.loggers(cfg.logger, **peak_lr, global_batch_size=batch.global_size),
        callbacks=[  # what takes part in a run, in order
            lockstep.ValidateEvery(cfg.val_every),
            lockstep.MicroBatchSeeds(cfg.seed),
            *counting,
            lockstep.Metrics(batch, every=cfg.log_every, peak_tflops=cfg.peak_tflops),
            *lockstep.instantiate_all(cfg.callbacks),  # yours
            lockstep.build(cfg.guard, run=run),
            lockstep.ClipAndSkip(cfg.clip_norm, max_skipped=cfg.max_skipped),
            lockstep.GracefulStop(),
            lockstep.build(cfg.checkpoint, run=run),
            lockstep.StateInMemory(run, every=cfg.memory),
        ],
        plugins=run.plugins,
        default_root_dir=run.path,
    )
    scaling = f"{cfg.optim.lr:g} x {peak / cfg.optim.lr:g} = {peak:g} ({cfg.lr_scaling})"
    rates = {"lr": scaling} if is_scheduled else {}
    run.announce(trainer, module, data, batch, *([schedule] if is_scheduled else []), **rates)
    return module, data, trainer


@lockstep.main(str(CONFIGS), "train")  # in hydra.main's place
def main(cfg: DictConfig, run: lockstep.Run) -> float:
    """Train to the end as one rank; return the metric that a sweep compares."""
    module, data, trainer = build(cfg, run)
    trainer.fit(module, data, ckpt_path=run.checkpoint(trainer))
    is_ours = type(module) is GPTModule  # not a class derived from it, whose batches may differ
    can_generate = is_ours and hasattr(module.model, "generate") and hasattr(data, "tokenizer")
    run.suggest(*(["generate"] if can_generate else []), "evaluate")
    return run.finish(trainer, metric=cfg.checkpoint.monitor)


if __name__ == "__main__":
    main()
