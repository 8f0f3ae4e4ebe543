"""Checks of `trainer` and `strategy`, whose settings are Lightning's and ours."""

from typing import Any

from lockstep_gpt.settings import check, check_choice, check_switch

# Arguments of Lightning's Trainer that are refused, and why: they would break the promise, or have
# their values from elsewhere, and two ways to set one could silently disagree.
REFUSED = {
    "accumulate_grad_batches": "follows from the batch; set batch.micro_size",
    "barebones": "would switch off what every run writes; leave it out",
    "callbacks": "is a group of its own; set callbacks",
    "default_root_dir": "is the run's folder; set run_dir",
    "log_every_n_steps": "has another name; set log_every",
    "logger": "is a group of its own; set logger",
    "max_steps": "has another name; set max_steps, without trainer",
    "precision": "has another name; set precision, without trainer",
    "strategy": "is a group of its own; set strategy",
    "use_distributed_sampler": "follows from the data: our loaders need none",
    "val_check_interval": "counts micro-batches, and a step has fewer of them on more devices; set "
    "val_every, which counts steps",
}
CLIPPING = ("gradient_clip_algorithm", "gradient_clip_val")
OF_EPOCHS = (
    "check_val_every_n_epoch",
    "max_epochs",
    "min_epochs",
    "reload_dataloaders_every_n_epochs",
)
MAKES_EPOCHS = ("fast_dev_run", "limit_train_batches", "overfit_batches")


MOST_RANKS = 1024
MOST_NODES = 100_000
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


BACKENDS = (None, "nccl", "gloo", "mpi")


COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")


SWITCHES = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def check_trainer(
    trainer: dict[str, Any], *, clips_itself: bool = False, is_endless: bool = False
) -> None:
    """Check the arguments of Lightning's Trainer that decide devices, or that are refused.

    Args:
        trainer: the arguments.
        clips_itself: whether the Trainer clips gradients: `optim.clip_norm` is the GPT's.
        is_endless: whether the training data has no end, and so no epochs, as ours.
    """
    has_epochs = not is_endless or any(trainer.get(name) for name in MAKES_EPOCHS)
    for name, value in trainer.items():
        rule = refusal(name, value, clips_itself=clips_itself, has_epochs=has_epochs)
        check(f"trainer.{name}", value, rule is None, rule or "")
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    count = "a whole number of at least 1"
    fits = devices == "auto" or _is_count(devices)
    check("trainer.devices", devices, fits, f"must be auto or {count}")
    check("trainer.num_nodes", nodes, _is_count(nodes), f"must be {count}")
    too_many = isinstance(devices, int) and devices > MOST_RANKS
    check("trainer.devices", devices, not too_many, f"must be at most {MOST_RANKS} on one machine")
    check("trainer.num_nodes", nodes, nodes <= MOST_NODES, f"must be at most {MOST_NODES}")
    check_choice("trainer.accelerator", trainer.get("accelerator", "auto"), ACCELERATORS)
    check_switch("trainer.sync_batchnorm", trainer.get("sync_batchnorm", False))


def refusal(name: str, value: Any, *, clips_itself: bool, has_epochs: bool) -> str | None:
    """Return why an argument of the Trainer is refused; None if it is passed on."""
    if name in CLIPPING and not clips_itself:
        return "is for a module of your own; set optim.clip_norm"
    if (name, value) == ("enable_checkpointing", False):
        return "would leave a killed run nothing to continue from; set checkpoint.every=null"
    if name in OF_EPOCHS and not has_epochs and value not in (None, -1):
        makers = ", ".join(f"trainer.{maker}" for maker in MAKES_EPOCHS)
        return f"counts epochs, and token data has none; set max_steps, or one of {makers}"
    return REFUSED.get(name)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_strategy(strategy: dict[str, Any]) -> None:
    """Check the settings of our own strategies; others check their own."""
    check_choice("strategy.process_group_backend", strategy.get("process_group_backend"), BACKENDS)
    check_choice("strategy.comm_hook", strategy.get("comm_hook", "none"), COMM_HOOKS)
    for name in ("timeout_seconds", "bucket_cap_mb"):
        value = strategy.get(name, 1)
        fits = not isinstance(value, bool) and isinstance(value, int | float) and value > 0
        check(f"strategy.{name}", value, fits, "must be a number above 0")
    for name in SWITCHES:
        check_switch(f"strategy.{name}", strategy.get(name, False))
    check_choice("strategy.split_graph", strategy.get("split_graph", True), (True, False, "auto"))
