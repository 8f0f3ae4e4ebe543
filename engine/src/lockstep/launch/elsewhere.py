"""What people type in other projects on Lightning and Hydra, and how to do the same here."""

from collections.abc import Iterable

NOTHING = ("none", "null")  # how groups elsewhere are left empty
CALLBACK = "lightning.pytorch.callbacks"
# A choice of a group elsewhere, or one that Lightning advises -> how to do the same.
CHOICES = {
    "strategy=ddp_find_unused_parameters_true": "set strategy=ddp "
    "strategy.find_unused_parameters=true",
    "trainer=ddp_sim": "set trainer=cpu strategy=ddp",
    "trainer=default": "set trainer=auto",
    "callbacks=early_stopping": f"set +callbacks.stop._target_={CALLBACK}.EarlyStopping "
    "+callbacks.stop.monitor=val/loss",
    "callbacks=model_checkpoint": "set checkpoint.every or checkpoint.keep_best",
    "callbacks=model_summary": "set trainer.enable_model_summary=true",
    "callbacks=rich_progress_bar": "set callbacks.progress=null trainer.enable_progress_bar=true",
    "logger=comet": "set +logger.comet._target_=lightning.pytorch.loggers.CometLogger",
    "logger=csv": "set logger=none, since every run writes metrics.csv",
    "logger=many_loggers": "set logger=[wandb,tensorboard], for example",
}
# A setting elsewhere -> what a program must have for the advice, and the advice.
SETTINGS = {
    "ckpt_path": ("resume", "set resume=CHECKPOINT, or run_dir=RUN resume=auto to continue a run"),
    "data.batch_size": (
        "batch.global_size",
        "set batch.global_size, of all devices, or batch.micro_size",
    ),
    "data.num_workers": ("data.packing", "leave it out, since a thread reads the tokens"),
    "data.pin_memory": ("data.packing", "leave it out, since a thread reads the tokens"),
    "data.data_dir": ("data.root", "set data.root"),
    "debug": (
        "trainer",
        "set experiment=debug, or trainer.fast_dev_run=true, trainer.overfit_batches=3, "
        "max_steps=20, or trainer.profiler=simple",
    ),
    "callbacks.early_stopping": ("callbacks", CHOICES["callbacks=early_stopping"]),
    "extras": ("resume", "leave it out; --cfg job prints the settings"),
    "hparams_search": ("experiment=search", "set --multirun experiment=search"),
    "hydra.job_logging.root.level": ("verbosity", "set verbosity=debug"),
    "local": ("resume", "add --config-dir FOLDER, which has YAML files of yours"),
    "model.scheduler": ("schedule.decay", "set schedule.warmup or schedule.decay"),
    "optimized_metric": ("checkpoint.monitor", "set checkpoint.monitor, which a sweep compares"),
    "paths": ("run_dir", "set run_dir"),
    "paths.data_dir": ("data.root", "set data.root"),
    "task_name": ("run_dir", "set run_dir or run_name"),
    "test": ("data.packing", "leave it out; after the run, evaluate RUN measures"),
    "train": ("data.packing", "leave it out; without training, evaluate RUN measures"),
}
OURS = ("resume", "run_dir", "verbosity")  # of every program


def choice_here(
    group: str, choice: str, options: Iterable[str], others: Iterable[str]
) -> str | None:
    """Return how to choose here what a choice means elsewhere; None: unknown.

    Args:
        group: that lacks the choice.
        choice: what was typed.
        options: the choices that the group has.
        others: those of all other groups, as `strategy=ddp`.
    """
    if f"{group}={choice}" in CHOICES:
        return CHOICES[f"{group}={choice}"]
    if choice in NOTHING:
        return f"set {group}=none" if "none" in options else f"set {group}=[] for none"
    found = [each for each in others if each.partition("=")[2] == choice]
    return f"did you mean {found[0]}?" if len(found) == 1 else None


def setting_here(name: str, known: Iterable[str]) -> str | None:
    """Return how to do here what a setting does elsewhere; None: unknown, or not in this program.

    Args:
        name: the setting, which this program lacks.
        known: the names that it has, and its choices.
    """
    names = {*known, *OURS}
    while name:
        needed, advice = SETTINGS.get(name, ("", ""))
        if needed in names:
            return advice
        name = name.rpartition(".")[0]
    return None
