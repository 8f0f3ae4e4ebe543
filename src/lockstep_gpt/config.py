"""Every setting of this project: its type, default, meaning, and check.

Hydra merges the YAML files and the command line into these dataclasses, so an error names the
setting that is misspelled or has the wrong type. `trainer`, `strategy`, `callbacks`, and `logger`
are Lightning's, so any name is allowed there. This module never imports torch.
"""

import functools
import logging
import math
import re
from dataclasses import Field, asdict, dataclass, field, fields
from importlib.util import find_spec
from operator import ge, gt, le, lt
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt.catalog import extra_of_group, extra_of_target, how_to_add
from lockstep_gpt.exits import Exit
from lockstep_gpt.registry import config_folders_of_extras, settings_classes

PROGRAM = "lockstep-gpt"
VERSION = "0.1.0"  # as in pyproject.toml
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}
TARGET = r"^_target_: *(\S+)"  # the line of a YAML file that names a class
OPEN_GROUPS = ("trainer", "strategy", "callbacks", "logger")  # Lightning's own settings


class UserError(ValueError):
    """A mistake that the user can fix: one line, exit status 2, no traceback."""

    status = Exit.MISTAKE


class RunError(Exception):
    """An event, not a mistake, that ends a run, such as a full disk: one line, exit status 1."""

    status = Exit.FAILED


class ReportedError(Exception):
    """Another process has reported why this one ends with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"reported elsewhere; exit status {status}")
        self.status = status


def setting(
    meaning: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    on_resume: str | None = None,
    **limits: float,
) -> Any:
    """Declare a setting by its `meaning`; without a `default`, a preset or the user must set it.

    On resume, it is `kept` by the run, decided by the `machine`, or `free`; None: as in its class.
    The `limits` of a number are `at_least`, `above`, `at_most`, and `below`.
    """
    rules = {name.replace("_", " "): limit for name, limit in limits.items()}
    about = {"meaning": meaning, "choices": choices, "limits": rules, "on_resume": on_resume}
    return field(default=default, metadata=about)


_HOLDS = {"at least": ge, "above": gt, "at most": le, "below": lt}


class Checked:
    """Checks every field against its own rules when an instance is created."""

    node: ClassVar[str] = ""  # the class's place in the settings tree, as the user writes it
    on_resume: ClassVar[str] = "free"  # for its settings that don't declare their own

    def __post_init__(self) -> None:
        for item in fields(cast(Any, self)):
            self._check(item, getattr(self, item.name))

    @classmethod
    def names(cls, on_resume: str) -> list[str]:
        """Return the settings that a resume treats this way: `kept`, `machine`, or `free`."""
        own, items = cls.on_resume, fields(cast(Any, cls))
        return [i.name for i in items if (i.metadata.get("on_resume") or own) == on_resume]

    def _check(self, item: Field[Any], value: Any) -> None:
        name, rules = item.name, item.metadata
        if (choices := rules.get("choices")) and value not in choices:
            self.refuse(name, f"is not one of {', '.join(choices)}")
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(name, "must be a finite number")
        for rule, limit in rules.get("limits", {}).items():
            if isinstance(value, int | float) and not _HOLDS[rule](value, limit):
                self.refuse(name, f"must be {rule} {limit}")

    def refuse(self, name: str, rule: str) -> None:
        """Raise a `UserError` that names the setting and the rule that it breaks."""
        check(f"{self.node}.{name}".lstrip("."), getattr(self, name), False, rule)


class ExtraSettings(Checked):
    """A group of settings of its own that an extra adds; see `registry.SETTINGS`."""

    @classmethod
    def of(cls, config: "Config") -> Self:
        """Return these settings of a run; the defaults if the run doesn't set any."""
        settings = config.of_extras.get(cls.node)
        return settings if isinstance(settings, cls) else cls()


def check(setting: str, value: Any, holds: bool, rule: str) -> None:
    """Raise a `UserError` if a setting's value breaks the `rule`, that is, unless it `holds`."""
    if not holds:
        raise UserError(f"{setting}={as_typed(value)} {rule}")


def as_typed(value: Any) -> str:
    """Return `value` as you type it on a command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def counted(count: int, unit: str, plural: str = "s") -> str:
    """Return a count with its unit: `1 step`, `2,000 steps`."""
    return f"{count:,} {unit}{plural if count != 1 else ''}"


def is_module(folder: str, name: str) -> bool:
    """Return whether a folder of the package contains this module."""
    return name.isidentifier() and bool(find_spec(f"{__package__}.{folder}.{name}"))


@dataclass
class BatchConfig(Checked):
    """How many samples an optimizer step uses; `training/schedule.py` does the arithmetic."""

    node: ClassVar[str] = "batch"
    micro_size: int | None = setting(
        "samples per device and micro-batch; null: a device's part of global_size", None, at_least=1
    )
    global_size: int | None = setting(
        "samples per optimizer step on all devices; null: micro_size x devices at the first start",
        None,
        on_resume="kept",
        at_least=1,
    )
    reference_size: int = setting("global batch for which optim.lr was tuned", 12, at_least=1)
    exact_micro_size: int | None = setting(
        "samples of a micro-batch, for bitwise equal results on any number of devices; null: "
        "equal up to rounding",
        None,
        on_resume="kept",
        at_least=1,
    )
    exact_threads: int = setting(
        "CPU threads per rank with exact_micro_size; other numbers round differently",
        1,
        on_resume="kept",
        at_least=1,
    )

    def __post_init__(self) -> None:
        """Also check that the sizes fit together."""
        super().__post_init__()
        if self.exact_micro_size is not None:
            self._check_exact(self.exact_micro_size)
            self.micro_size = self.exact_micro_size
        if self.micro_size is None and self.global_size is None:
            self.refuse("micro_size", "and batch.global_size=null leave it open; set one of them")

    def _check_exact(self, exact: int) -> None:
        """Check that all micro-batches can have this size, and that it divides the global size."""
        total = self.global_size
        if total is None:
            self.refuse("exact_micro_size", "needs a batch.global_size, which is null; set it")
        elif total % exact:
            nearest = next(size for size in range(min(exact, total), 0, -1) if total % size == 0)
            rule = f"must divide batch.global_size={total}; nearest: {nearest}"
            self.refuse("exact_micro_size", rule)
        if self.micro_size not in (None, exact):
            rule = f"and batch.micro_size={self.micro_size} are two sizes; set one to null"
            self.refuse("exact_micro_size", rule)


@dataclass
class ModelConfig(Checked):
    """The shape of the GPT; its vocabulary size comes from the data's tokenizer."""

    node: ClassVar[str] = "model"
    on_resume: ClassVar[str] = "kept"
    block_size: int = setting("tokens of context, T", at_least=1)
    n_layer: int = setting("transformer blocks", at_least=1)
    n_head: int = setting("attention heads per block", at_least=1)
    n_embd: int = setting("width of the residual stream, C", at_least=1)
    dropout: float = setting("dropout probability", 0.0, on_resume="free", at_least=0, below=1)
    bias: bool = setting("biases in linear layers and norms, as in GPT-2", True)
    architecture: str = setting("gpt, modern, or another module of model/", "gpt")
    activation_checkpointing: bool = setting(
        "keep only inputs of blocks, recompute the rest in backward", False, on_resume="free"
    )
    n_kv_head: int | None = setting(
        "heads of keys and values, if the architecture shares them; null: n_head", None, at_least=1
    )
    ngram_rows: int = setting("modern: rows per n-gram embedding table; 0: none", 0, at_least=0)
    longest_ngram: int = setting("largest n of the n-grams; the smallest is 2", 2, at_least=2)
    init_from: str | None = setting(
        "run, checkpoint, or transformers folder with initial weights; null: random",
        None,
        on_resume="free",
    )

    def __post_init__(self) -> None:
        """Also check that the heads divide the width evenly, and that the architecture exists."""
        super().__post_init__()
        if not is_module("model", self.architecture):
            self.refuse("architecture", "is not gpt, modern, or another module of model/")
        if self.n_kv_head is not None and self.n_head % self.n_kv_head:
            self.refuse("n_kv_head", f"does not divide model.n_head={self.n_head}")
        if self.n_embd % self.n_head:
            fits = self.n_head * max(1, round(self.n_embd / self.n_head))
            rule = f"is not divisible by model.n_head={self.n_head}; nearest: model.n_embd={fits}"
            self.refuse("n_embd", rule)


@dataclass
class DataConfig(Checked):
    """`_target_` names the class that has the other settings."""

    node: ClassVar[str] = "data"
    kind: ClassVar[str] = "own"  # of data: begins the names of prepared folders
    on_resume: ClassVar[str] = "kept"  # what decides tokens; the machine decides where they are
    _target_: str = setting("class of the source, or of a LightningDataModule", "")
    root: str = setting("folder for prepared token files", "data", on_resume="machine")
    fingerprint: str | None = setting(
        "hash that the prepared tokens must have; null: that of the current corpus", None
    )
    val_fraction: float = setting("fraction held out for validation", 0.02, above=0, below=1)
    val_tokens: int | None = setting(
        "at most this many validation tokens; null: all", None, on_resume="free", at_least=1
    )
    test_fraction: float = setting("fraction held out for tests", 0.0, at_least=0, below=1)

    def __post_init__(self) -> None:
        """Also check that something is left to train on."""
        super().__post_init__()
        if self.val_fraction + self.test_fraction >= 1:
            self.refuse("test_fraction", f"and data.val_fraction={self.val_fraction} leave nothing")
        if not self._target_:  # made in code
            self._target_ = f"{type(self).__module__}.{type(self).__name__}"

    def files_of_export(self, tokenizer: Any, files: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the JSON files that an export adds or changes for a model of these data.

        Args:
            tokenizer: the model's.
            files: name -> content of those without them.
        """
        return {}

    @classmethod
    def suggestion(cls, name: str) -> str | None:  # noqa: ARG003
        """Return what to use instead of an unknown setting, if this class knows it."""
        return None


@dataclass
class DataModuleConfig(DataConfig):
    """A LightningDataModule of your own, which makes the batches; its arguments are free."""

    arguments: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "what it is called with"}
    )

    @classmethod
    def values_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return frozen `values` of `data` with the arguments apart."""
        known = {item.name for item in fields(cls)}
        others = {name: value for name, value in values.items() if name not in known}
        ours = {name: value for name, value in values.items() if name in known}
        return {**ours, "arguments": {**ours.get("arguments", {}), **others}}


def data_class(target: str) -> type[DataConfig]:
    """Return the settings class of `data._target_`, or raise a `UserError` if there is no such.

    Only classes of this package are imported: the name may be from a file of someone else.
    """
    if not target.startswith(f"{__package__}."):
        return DataModuleConfig
    if extra := extra_of_target(target):
        raise UserError(f"data._target_={target} needs {how_to_add(extra)}")
    try:
        found = resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"data._target_={target} cannot be imported ({error}); name a class as "
            f"{__package__}.module.Class"
        ) from error
    is_settings = isinstance(found, type) and issubclass(found, DataConfig)
    return found if is_settings else DataModuleConfig


def config_folder() -> Path:
    """Return the folder of the YAML files: in the installed package, else in the source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[1] / "configs"


def config_folders() -> list[Path]:
    """Return the project's folder of YAML files, and those of extras."""
    return [config_folder(), *config_folders_of_extras().values()]


def yaml_files(group: str, *more: Path) -> dict[str, Path]:
    """Return the file of each choice of a group.

    Args:
        group: its name.
        more: other folders of configurations.
    """
    folders = [*config_folders(), *more]
    paths = [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: path for path in paths}


def target_of(group: str, choice: str) -> str | None:
    """Return the class that a choice of a group names; None if there is no such choice."""
    path = yaml_files(group).get(choice)
    if path is None:
        return None
    target = re.search(TARGET, path.read_text(encoding="utf-8"), re.MULTILINE)
    return target[1] if target else None


def data_choices(*more: Path) -> dict[str, type[DataConfig]]:
    """Return the settings class of each YAML file that takes its settings from one.

    Args:
        more: other folders of configurations.
    """
    classes = {}
    for choice, path in yaml_files("data", *more).items():
        text = path.read_text(encoding="utf-8")
        target = re.search(TARGET, text, re.MULTILINE)
        if target and f"/hydra/schema/data/{choice}@" in text:
            classes[choice] = data_class(target[1])
    return classes


@dataclass
class PackingConfig(Checked):
    """How tokens fill windows, the samples; `_target_` names the class."""

    node: ClassVar[str] = "packing"
    on_resume: ClassVar[str] = "kept"
    _target_: str = setting("class that makes the windows; empty: a stream", "")


DECAYS = ("cosine", "linear", "constant", "wsd")


@dataclass
class OptimConfig(Checked):
    """The optimizer and its learning rate over the run."""

    node: ClassVar[str] = "optim"
    algorithm: str = setting("adamw, muon, or another module of training/", on_resume="kept")
    lr: float = setting("peak learning rate at batch.reference_size", 1e-3, above=0)
    head_lr_fraction: float = setting("muon: the head's rate as a fraction of lr", 0.2, above=0)
    lr_scaling: str = setting(
        "how the peak grows with the global batch", "linear", choices=("linear", "sqrt", "none")
    )
    warmup_steps: int | None = setting("steps of linear warmup", None, at_least=0)
    warmup_tokens: int | None = setting("tokens of linear warmup", None, at_least=0)
    decay: str = setting(
        "the rate after warmup; wsd keeps the peak, then falls linearly", "cosine", choices=DECAYS
    )
    decay_fraction: float = setting("fraction of steps in which wsd falls", 0.2, above=0, at_most=1)
    final_lr_fraction: float = setting(
        "learning rate at the end, as a fraction of the peak", 0.1, at_least=0, at_most=1
    )
    beta1: float = setting("decay of the mean of gradients", 0.9, at_least=0, below=1)
    beta2: float = setting("decay of the mean of squared gradients", 0.95, at_least=0, below=1)
    eps: float = setting("added to Adam's denominator", 1e-8, above=0)
    weight_decay: float = setting("decoupled weight decay, of matrices only", 0.1, at_least=0)
    clip_norm: float | None = setting("largest gradient norm; null: no clipping", 1.0, above=0)

    def __post_init__(self) -> None:
        """Also check that the warmup isn't set twice, and that the optimizer exists."""
        super().__post_init__()
        if self.algorithm != "adamw" and not is_module("training", self.algorithm):
            self.refuse("algorithm", "is not adamw, muon, or another module of training/")
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            self.refuse("warmup_steps", "and optim.warmup_tokens are both set; set one to null")


@dataclass
class CheckpointConfig(Checked):
    """When a run saves its state, and what it keeps."""

    node: ClassVar[str] = "checkpoint"
    every: int | None = setting(
        "optimizer steps between checkpoints; null: only at the end", 500, at_least=1
    )
    keep_last: int = setting("how many of the newest checkpoints to keep", 1, at_least=1)
    keep_best: int = setting("how many of the best checkpoints to keep, by val/loss", 1, at_least=0)
    background: bool = setting(
        "copy the state in memory, and write the copy while training continues", False
    )
    copy_to: str | None = setting("also keep checkpoints in this folder or fsspec URL", None)


@dataclass
class LaunchConfig(Checked):
    """How the ranks start and end."""

    node: ClassVar[str] = "launch"
    on_resume: ClassVar[str] = "machine"
    inline: bool = setting("run the only rank in the parent process, for a debugger", False)
    keep_memory: bool = setting(
        "keep freed memory for the next step: faster on CPUs, but uses more memory", True
    )
    max_restarts: int = setting("how many times ranks restart after a kill", 3, at_least=0)
    grace_seconds: float = setting(
        "time for ranks to save and end after a signal, before they are killed", 60.0, above=0
    )
    node_rank: int = setting(
        "number of this machine, from 0 to trainer.num_nodes - 1", 0, at_least=0
    )
    rdzv_endpoint: str | None = setting("HOST:PORT of machine 0, where all machines meet", None)
    min_nodes: int | None = setting(
        "continue with at least this many machines; null: trainer.num_nodes", None, at_least=1
    )
    join_seconds: float = setting(
        "longest wait for the other machines, or for the other ranks of a launcher", 300.0, above=0
    )
    lost_seconds: float = setting("silence after which a machine counts as lost", 15.0, above=0)


@dataclass
class GuardConfig(Checked):
    """When a run stops because something is wrong."""

    node: ClassVar[str] = "guard"
    max_skipped: int = setting(
        "non-finite updates to skip before failing (in 16-mixed: only those at loss scale <= 1)",
        0,
        at_least=0,
    )
    replicas_every: int | None = setting(
        "steps between comparisons of the ranks' weights; each save compares too", 500, at_least=1
    )
    stall_after: float | None = setting(
        "seconds without a step until every rank shows its stack and the run ends", 1800.0, above=0
    )


if TYPE_CHECKING:
    AnyData = DataConfig
else:
    AnyData = Any  # to OmegaConf: a user's LightningDataModule has its own arguments

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true")


@dataclass
class Config(Checked):
    """The settings of the whole run."""

    seed: int = setting(  # torch uses 63 bits
        "seed: weights, data order, dropout", 1337, on_resume="kept", at_least=0, at_most=2**63 - 1
    )
    max_steps: int | None = setting("optimizer steps of the run", None, at_least=1)
    max_tokens: int | None = setting("tokens of the run, instead of steps", None, at_least=1)
    run_name: str | None = setting("name of the run; null: model-data-ranks-date", None)
    run_dir: str | None = setting("folder of the run; null: a new one under runs/", None)
    resume: str = setting(
        "none; auto: continue run_dir if it exists; a run or checkpoint: start from it", "none"
    )
    test: bool = setting("test the trained model on the test split", False)
    resume_force: bool = setting("resume even if settings kept on resume differ", False)
    trust_run_dir: bool = setting("resume=auto: use unknown classes in run_dir/config.yaml", False)
    precision: str = setting("precision of forward and backward", "32-true", choices=PRECISIONS)
    compile: bool = setting("compile the GPT with torch.compile", False)
    peak_tflops: float | None = setting(
        "device's dense peak TFLOPS, for throughput/mfu; null: from a table of GPUs", None, above=0
    )
    val_every: int = setting("optimizer steps between validations", 250, at_least=1)
    log_every: int = setting("optimizer steps between rows of metrics", 10, at_least=1)
    verbosity: str = setting("what the terminal shows", "normal", choices=tuple(LEVELS))
    batch: BatchConfig = MISSING
    model: ModelConfig = MISSING
    data: AnyData = MISSING
    packing: PackingConfig = field(default_factory=PackingConfig)
    optim: OptimConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    of_extras: dict[str, Any] = field(default_factory=dict)  # group -> its `ExtraSettings`

    def __post_init__(self) -> None:
        """Also check combinations of settings; drop callbacks and loggers that are null."""
        super().__post_init__()
        self.callbacks = {name: node for name, node in self.callbacks.items() if node is not None}
        self.logger = {name: node for name, node in self.logger.items() if node is not None}
        if (self.max_steps is None) == (self.max_tokens is None):
            tokens = as_typed(self.max_tokens)
            self.refuse("max_steps", f"and max_tokens={tokens}: give one and set the other to null")
        _check_trainer(self.trainer)
        _check_strategy(self.strategy)


def groups(target: str | None = None) -> dict[str, Any]:
    """Return each group's settings class; for `data`, the class of its `_target_`."""
    core = {kind.node: kind for kind in Checked.__subclasses__() if kind.node}
    data = data_class(target) if target else DataConfig
    return {**core, **settings_classes(), "data": data}


def settings_on_resume(treated: str, target: str | None = None) -> set[str]:
    """Return all settings that a resume treats this way: `kept`, `machine`, or `free`.

    Args:
        treated: how.
        target: `data._target_`; None: the settings of all choices of `data`.
    """
    classes = {Config, *groups(target).values()}
    if target is None:
        classes |= {*data_choices().values()}
    return {f"{each.node}.{name}".lstrip(".") for each in classes for name in each.names(treated)}


# Trainer arguments that our settings replace: two ways to set one could silently disagree.
_OWNED = {
    "batch.global_size": "accumulate_grad_batches",
    "callbacks": "callbacks",
    "checkpoint.every": "enable_checkpointing",
    "data.val_tokens": "limit_val_batches limit_test_batches limit_predict_batches",
    "log_every": "log_every_n_steps",
    "logger": "logger",
    "max_steps": "max_steps min_steps fast_dev_run limit_train_batches overfit_batches",
    "max_steps or max_tokens": "max_epochs min_epochs reload_dataloaders_every_n_epochs",
    "optim.clip_norm": "gradient_clip_algorithm gradient_clip_val",
    "precision": "precision",
    "run_dir": "default_root_dir",
    "seed": "use_distributed_sampler",
    "strategy": "strategy",
    "val_every": "check_val_every_n_epoch num_sanity_val_steps val_check_interval",
    "verbosity": "barebones enable_model_summary enable_progress_bar",
}
OWNED_TRAINER_KEYS = {key: door for door, keys in _OWNED.items() for key in keys.split()}
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
BACKENDS = (None, "nccl", "gloo", "mpi")
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
SWITCHES = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")


def _check_trainer(trainer: dict[str, Any]) -> None:
    for key, value in trainer.items():
        # `limit_val_batches=0` turns off validation, which none of our settings does.
        if (door := OWNED_TRAINER_KEYS.get(key)) and (key, value) != ("limit_val_batches", 0):
            raise UserError(owned_key_line(key, value, door))
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    count = "a whole number of at least 1"
    fits = devices == "auto" or _is_count(devices)
    check("trainer.devices", devices, fits, f"must be auto or {count}")
    check("trainer.num_nodes", nodes, _is_count(nodes), f"must be {count}")
    check_choice("trainer.accelerator", trainer.get("accelerator", "auto"), ACCELERATORS)
    check_switch("trainer.sync_batchnorm", trainer.get("sync_batchnorm", False))


def owned_key_line(key: str, value: Any, door: str) -> str:
    """Return an error line that names our setting for the Trainer's argument `key`."""
    return f"trainer.{key}={as_typed(value)} cannot be set there; set {door} instead"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_strategy(strategy: dict[str, Any]) -> None:
    """Check the settings of our own strategies; others check their own."""
    check_choice("strategy.process_group_backend", strategy.get("process_group_backend"), BACKENDS)
    check_choice("strategy.comm_hook", strategy.get("comm_hook", "none"), COMM_HOOKS)
    for name in ("timeout_seconds", "bucket_cap_mb"):
        value = strategy.get(name, 1)
        fits = not isinstance(value, bool) and isinstance(value, int | float) and value > 0
        check(f"strategy.{name}", value, fits, "must be a number above 0")
    for name in SWITCHES:
        check_switch(f"strategy.{name}", strategy.get(name, False))


def check_switch(setting: str, value: Any) -> None:
    """Raise a `UserError` if a setting is neither true nor false."""
    check(setting, value, isinstance(value, bool), "must be true or false")


def check_choice(setting: str, value: Any, choices: tuple[str | None, ...]) -> None:
    """Raise a `UserError` if a setting is not one of its choices."""
    check(setting, value, value in choices, f"is not one of {', '.join(map(as_typed, choices))}")


@functools.cache  # it takes longer than merging the values
def with_groups(*classes: tuple[str, Any]) -> Any:
    """Return an empty configuration whose groups have the types of these `classes`."""
    node = OmegaConf.structured(Config)
    OmegaConf.set_struct(node, False)
    del node["of_extras"]  # no setting: `from_container` fills it
    for name, kind in classes:
        node[name] = kind
    OmegaConf.set_struct(node, None)  # its dataclass closes it again; its dictionaries are open
    return node


def from_container(values: dict[str, Any], file: Path | None = None) -> Config:
    """Check plain `values` against the schema and resolve references to the environment.

    Raises a `UserError` that names the `file` and the problem; without a `file`, OmegaConf's error.
    """
    target = values.get("data", {}).get("_target_")
    _refuse_absent_groups(values, file)
    try:
        if target and data_class(target) is DataModuleConfig:
            values = {**values, "data": DataModuleConfig.values_of(values["data"])}
        typed = OmegaConf.merge(with_groups(*groups(target).items()), values)
        config = cast(Config, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        if file is None:
            raise
        raise UserError(
            f"{file} cannot be read ({error.full_key}: {str(error).splitlines()[0]}); delete that "
            f"setting, or use the version of {PROGRAM} that wrote it"
        ) from None
    # OmegaConf sets the groups of extras as attributes, which `dataclasses.replace` would drop.
    config.of_extras = {name: vars(config).pop(name) for name in settings_classes()}
    return config


def as_values(config: Config) -> dict[str, Any]:
    """Return a configuration as plain values, which `from_container` reads.

    As in a frozen file, groups of extras that have their default values are left out.
    """
    values = asdict(config)
    of_extras = values.pop("of_extras")
    return without_defaults({**values, **of_extras})


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return frozen `values` with the groups of extras that `without_defaults` left out."""
    defaults = {
        name: OmegaConf.to_container(OmegaConf.structured(kind))
        for name, kind in settings_classes().items()
    }
    return {**defaults, **values}


def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` to freeze without the groups of extras that have their default values.

    A project without these extras can then continue the run.
    """
    kept = dict(values)
    for name, kind in settings_classes().items():
        if kept.get(name) == OmegaConf.to_container(OmegaConf.structured(kind)):
            del kept[name]
    return kept


def _refuse_absent_groups(values: dict[str, Any], file: Path | None) -> None:
    """Raise a `UserError` for settings of an extra that is not installed."""
    for name, group in values.items():
        if extra := extra_of_group(name):
            settings = ", ".join(f"{name}.{key}={as_typed(value)}" for key, value in group.items())
            where = f"{file}: " if file else ""
            raise UserError(f"{where}{settings} needs {how_to_add(extra)}")
