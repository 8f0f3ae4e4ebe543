"""Our names for other projects' settings; docs/lightning.md shows them as a table."""

STEPS = "max_steps or max_tokens"
# Of lightning-hydra-template, nanoGPT, litgpt, and Hugging Face's Trainer. Names that a group of
# ours has are found anyway.
NAMES = {
    # Common to several
    "batch_size": "batch.micro_size or batch.global_size",
    "ckpt_path": "resume",
    "data.file": "data.path",
    "data.files": "data.path",
    "debug": "experiment=debug",
    "epochs": STEPS,
    "gradient_accumulation_steps": "batch.global_size",
    "grad_clip": "optim.clip_norm",
    "learning_rate": "optim.lr",
    "max_epochs": STEPS,
    "max_iters": "max_steps",
    "min_lr": "optim.final_lr_fraction",
    "output_dir": "run_dir",
    "tags": "logger.wandb.tags",
    "warmup_iters": "optim.warmup_steps",
    # lightning-hydra-template
    "callbacks.early_stopping": (
        "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping, and "
        "+callbacks.stop.monitor=val/loss"
    ),
    "callbacks.model_checkpoint": "checkpoint",
    "data.batch_size": "batch.micro_size or batch.global_size",
    "extras": "verbosity",
    "hparams_search": "experiment=search with --multirun",
    "csv": "metrics.csv, which every run writes",  # a choice of logger=
    "ddp": "strategy=ddp with trainer.devices",  # and of trainer=
    "ddp_sim": "strategy=ddp with trainer=cpu trainer.devices=2",
    "many_loggers": "a list, logger=[wandb,tensorboard]",
    "logger.wandb.offline": "logger.wandb.mode=offline",
    "model.compile": "compile",
    "model.optimizer": "optim",
    "model.optimizer.lr": "optim.lr",
    "model.optimizer.weight_decay": "optim.weight_decay",
    "model.scheduler": "optim.decay",
    "optimized_metric": "val/loss, always",
    "paths": "run_dir and data.root",
    "paths.data_dir": "data.root",
    "paths.output_dir": "run_dir",
    "task_name": "run_name",
    "test": "the command evaluate",
    "train": "the command evaluate, to measure without training",
    # nanoGPT
    "always_save_checkpoint": "checkpoint.keep_last",
    "backend": "strategy.process_group_backend",
    "dataset": "data",
    "decay_lr": "optim.decay",
    "device": "trainer.accelerator",
    "dtype": "precision",
    "eval_interval": "val_every",
    "eval_iters": "data.val_tokens",
    "eval_only": "the command evaluate",
    "init_from": "model.init_from, or resume",
    "log_interval": "log_every",
    "lr_decay_iters": "max_steps, where the decay ends",
    "out_dir": "run_dir",
    "wandb_log": "logger=wandb or logger=none",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "run_name",
    # litgpt
    "eval.interval": "val_every",
    "eval.max_iters": "data.val_tokens",
    "initial_checkpoint_dir": "model.init_from",
    "logger_name": "logger",
    "model_name": "model",
    "optimizer": "optim",
    "tokenizer_dir": "data.tokenizer",
    "data.train_data_path": "data.path",
    "train.epochs": STEPS,
    "train.global_batch_size": "batch.global_size",
    "train.log_interval": "log_every",
    "train.lr_warmup_steps": "optim.warmup_steps",
    "train.max_norm": "optim.clip_norm",
    "train.max_seq_length": "model.block_size",
    "train.max_steps": "max_steps",
    "train.max_tokens": "max_tokens",
    "train.micro_batch_size": "batch.micro_size",
    "train.min_lr": "optim.final_lr_fraction",
    "train.save_interval": "checkpoint.every",
    # Hugging Face's Trainer
    "bf16": "precision",
    "eval_steps": "val_every",
    "fp16": "precision",
    "logging_steps": "log_every",
    "lr_scheduler_type": "optim.decay",
    "max_grad_norm": "optim.clip_norm",
    "num_train_epochs": STEPS,
    "per_device_train_batch_size": "batch.micro_size or batch.global_size",
    "report_to": "logger",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
}


def our_name(word: str) -> str | None:
    """Return our name for another project's setting; None if it is unknown."""
    name = word.replace("-", "_")
    while name:
        if name in NAMES:
            return NAMES[name]
        name = name.rpartition(".")[0]  # its parent
    group, dot, name = word.rpartition(".")
    ours = NAMES.get(name, "")  # `optim.learning_rate`
    if dot and ours.startswith(f"{group}."):
        return ours
    return None
