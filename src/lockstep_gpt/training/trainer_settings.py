"""Checks of `trainer` and `strategy`, whose settings are Lightning's and ours."""

from typing import Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import as_typed, check, check_choice, check_switch

# Trainer arguments that our settings replace: two ways to set one could silently disagree.
_OWNED = {
    "batch.global_size": "accumulate_grad_batches",
    "callbacks": "callbacks",
    "checkpoint.every": "enable_checkpointing",
    "data.val_tokens": "limit_val_batches limit_test_batches limit_predict_batches",
    "log_every": "log_every_n_steps",
    "logger": "logger",
    "max_steps": "max_steps min_steps max_epochs min_epochs fast_dev_run limit_train_batches "
    "overfit_batches reload_dataloaders_every_n_epochs",
    "optim.clip_norm": "gradient_clip_algorithm gradient_clip_val",
    "precision": "precision",
    "run_dir": "default_root_dir",
    "seed": "use_distributed_sampler",
    "strategy": "strategy",
    "val_every": "check_val_every_n_epoch num_sanity_val_steps val_check_interval",
    "verbosity": "barebones enable_model_summary enable_progress_bar",
}


CLIPPING = ("gradient_clip_algorithm", "gradient_clip_val")
OWNED_TRAINER_KEYS = {key: ours for ours, keys in _OWNED.items() for key in keys.split()}


MOST_RANKS = 1024
MOST_NODES = 100_000
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")


BACKENDS = (None, "nccl", "gloo", "mpi")


COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")


SWITCHES = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def check_trainer(trainer: dict[str, Any], *, clips_itself: bool = False) -> None:
    """Check the arguments of Lightning's Trainer that decide devices, or that are ours to set.

    Args:
        trainer: the arguments.
        clips_itself: whether the Trainer clips gradients: `optim.clip_norm` is the GPT's.
    """
    for key, value in trainer.items():
        if clips_itself and key in CLIPPING:
            continue
        # `limit_val_batches=0` turns off validation, which none of our settings does.
        if key in OWNED_TRAINER_KEYS and (key, value) != ("limit_val_batches", 0):
            raise UserError(owned_key_line(key, value))
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


def owned_key_line(key: str, value: Any) -> str:
    """Return an error line that names our setting for the Trainer's argument `key`."""
    ours = OWNED_TRAINER_KEYS[key]
    return f"trainer.{key}={as_typed(value)} cannot be set there; set {ours} instead"


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
