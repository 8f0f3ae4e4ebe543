"""The settings of the whole run; each group's own are beside its code, in `*_settings.py`.

Hydra merges the YAML files and the command line into these dataclasses, so an error names the
setting that is misspelled or has the wrong type. `module`, `trainer`, `strategy`, `callbacks`, and
`logger` have the arguments of classes, so any name is allowed there. Nothing here imports torch.
"""

import functools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lockstep_gpt import PROGRAM
from lockstep_gpt.catalog import extra_of_group, how_to_add
from lockstep_gpt.tokens.data_settings import (
    DataConfig,
    DataModuleConfig,
    PackingConfig,
    data_choices,
    data_class,
)
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.launch_settings import LaunchSettings
from lockstep_gpt.logs import LEVELS
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.registry import settings_classes
from lockstep_gpt.run.run_settings import CheckpointConfig, GuardConfig
from lockstep_gpt.settings import Checked, as_typed, check, setting
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.trainer_settings import check_strategy, check_trainer

OPEN_GROUPS = ("module", "trainer", "strategy", "callbacks", "logger")  # arguments of classes
GPT_MODULE = f"{__package__}.training.module.GPTModule"  # `module._target_` of module=gpt
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "64-true")

if TYPE_CHECKING:
    AnyData = DataConfig
else:
    AnyData = Any  # to OmegaConf: a user's LightningDataModule has its own arguments


@dataclass
class Config(Checked):
    """The settings of the whole run."""

    seed: int = setting(  # torch uses 63 bits
        "seed: weights, data order, dropout", 1337, on_resume="kept", at_least=0, at_most=2**63 - 1
    )
    max_steps: int = setting("optimizer steps of the run", at_least=1)
    run_name: str | None = setting("name of the run; null: model-data-ranks-date", None)
    run_dir: str | None = setting("folder of the run; null: a new one under runs/", None)
    resume: str = setting(
        "none; auto: continue run_dir if it exists; a run or checkpoint: start from it", "none"
    )
    resume_force: bool = setting("resume even if settings kept on resume differ", False)
    trust_run_dir: bool = setting("resume=auto: use unknown classes in run_dir/config.yaml", False)
    precision: str = setting("precision of forward and backward", "32-true", choices=PRECISIONS)
    compile: bool = setting("compile the GPT with torch.compile", False)
    peak_tflops: float | None = setting(
        "device's dense peak TFLOPS, for throughput/mfu; null: looked up", None, above=0
    )
    val_every: int = setting("optimizer steps between validations", 250, at_least=1)
    log_every: int = setting("optimizer steps between rows of metrics", 10, at_least=1)
    verbosity: str = setting("what the terminal shows", "normal", choices=tuple(LEVELS))
    module: dict[str, Any] = field(default_factory=lambda: {"_target_": GPT_MODULE})
    batch: BatchConfig = MISSING
    model: ModelConfig = MISSING
    data: AnyData = MISSING
    packing: PackingConfig = field(default_factory=PackingConfig)
    optim: OptimConfig = MISSING
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    launch: LaunchSettings = field(default_factory=LaunchSettings)
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
        for group in ("callbacks", "logger"):
            for name, node in getattr(self, group).items():
                _refuse_without_class(f"{group}.{name}", node)
        # What becomes of true and false, and of an empty value, as of an unset shell variable.
        is_path = self.resume not in ("True", "False", "")
        rule = "is not none, auto, or a path; to continue a run, set run_dir=RUN resume=auto"
        check("resume", self.resume.lower(), is_path, rule)
        self._check_module()
        is_endless = not isinstance(self.data, DataModuleConfig)
        check_trainer(self.trainer, clips_itself=not self.trains_gpt, is_endless=is_endless)
        check_strategy(self.strategy)

    def _check_module(self) -> None:
        """Check what depends on whether the GPT is trained, or a module of the user's."""
        _refuse_without_class("module", self.module)
        if self.trains_gpt:
            return
        target = self.module["_target_"]
        rule = f"compiles the GPT only; let configure_model of {target} compile, and set false"
        check("compile", self.compile, not self.compile, rule)

    @property
    def trains_gpt(self) -> bool:
        """Whether the run trains this project's GPT, and not a module of the user's."""
        return bool(self.module["_target_"] == GPT_MODULE)

    @property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample; None: samples of the user's data, which need not have tokens."""
        if self.trains_gpt or not isinstance(self.data, DataModuleConfig):
            return self.model.block_size
        return None

    @property
    def tensor_parallel(self) -> int:
        """How many ranks split each matrix, and so have the same samples; 1: none does."""
        size: int = self.strategy.get("tensor_parallel", 1)
        return size

    @property
    def longest_wait(self) -> float:
        """How many seconds a rank waits for another one."""
        return float(self.strategy.get("timeout_seconds", 1800))

    @property
    def loses_error(self) -> bool:
        """Whether the strategy accumulates an error that no state of the run has."""
        return bool(self.strategy.get("comm_hook") == "powersgd")

    @property
    def saves_parts(self) -> bool:
        """Whether each rank saves its shards of a checkpoint."""
        return bool(self.strategy.get("save_parts", False))


def _refuse_without_class(path: str, node: Any) -> None:
    """Raise a `UserError` if a callback or a logger is a value, or names no class.

    It shows no other value than that of a switch, since others may be a secret.
    """
    if isinstance(node, dict) and "_target_" in node:
        return
    if path == "module":
        raise UserError("module has no _target_, which names its class; set module._target_")
    if str(node).lower() in ("false", "off", "no", "none"):
        raise UserError(f"{path}={node} is not a class; to leave it out, set {path}=null")
    group, _, name = path.partition(".")
    raise UserError(
        f"{path} has no _target_, which names its class; to set {name} of one that is chosen, "
        f"write {group}.CHOICE.{name}, else set {path}._target_"
    )


GROUPS: dict[str, type[Checked]] = {
    "batch": BatchConfig,
    "model": ModelConfig,
    "data": DataConfig,
    "packing": PackingConfig,
    "optim": OptimConfig,
    "checkpoint": CheckpointConfig,
    "guard": GuardConfig,
    "launch": LaunchSettings,
}


def groups(target: str | None = None) -> dict[str, Any]:
    """Return each group's settings class; for `data`, the class of its `_target_`."""
    data = data_class(target) if target else DataConfig
    return {**GROUPS, "data": data, **settings_classes()}


def settings_on_resume(treatment: str, target: str | None = None) -> set[str]:
    """Return all settings that a resume treats this way.

    Args:
        treatment: `kept`, `machine`, or `free`; see `settings.setting`.
        target: `data._target_`; None: the settings of all choices of `data`.
    """
    classes = {Config, *groups(target).values()}
    if target is None:
        classes |= {*data_choices().values()}
    return {
        f"{group.node}.{name}".lstrip(".") for group in classes for name in group.names(treatment)
    }


@functools.cache  # it takes longer than merging the values
def with_groups(*classes: tuple[str, Any]) -> Any:
    """Return an empty configuration whose groups have these types, as (group, class)."""
    node = OmegaConf.structured(Config)
    OmegaConf.set_struct(node, False)
    del node["of_extras"]  # no setting: `from_container` fills it
    for group, settings in classes:
        node[group] = settings
    OmegaConf.set_struct(node, None)  # its dataclass closes it again; its dictionaries are open
    return node


def from_container(values: dict[str, Any], file: Path | None = None) -> Config:
    """Check plain `values` against the schema and resolve references to the environment.

    Args:
        values: a whole configuration.
        file: where the values come from, for errors; None if a command line has just set them.

    Raises:
        UserError: a setting is invalid, or belongs to an extra that is not installed.
        OmegaConfBaseException: a name or a type doesn't fit the schema; with a `file`, this is a
            `UserError` too.
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

    As in a frozen file, groups of extras that have their default values are left out, and the
    arguments of a data module are beside its `_target_`.
    """
    values = asdict(config)
    if isinstance(config.data, DataModuleConfig):
        values["data"] = config.data.as_values()
    of_extras = values.pop("of_extras")
    return without_defaults({**values, **of_extras})


def with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return frozen `values` with the groups that `without_defaults` left out."""
    return {**_defaults(), **values}


def without_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` to freeze without the groups of extras that have their default values.

    A project without these extras can then continue the run. `module` is left out for the GPT: an
    earlier version, which had no other module, can read the file.
    """
    changed = dict(values)
    for group, defaults in _defaults().items():
        if changed.get(group) == defaults:
            del changed[group]
    return changed


def _defaults() -> dict[str, Any]:
    """Return the default values of each group that an extra adds, and of `module`."""
    of_extras = {
        group: OmegaConf.to_container(OmegaConf.structured(settings))
        for group, settings in settings_classes().items()
    }
    return {"module": {"_target_": GPT_MODULE}, **of_extras}


def _refuse_absent_groups(values: dict[str, Any], file: Path | None) -> None:
    """Raise a `UserError` for settings of an extra that is not installed."""
    for group, settings in values.items():
        extra = extra_of_group(group)
        if extra is None:
            continue
        listed = ", ".join(f"{group}.{name}={as_typed(value)}" for name, value in settings.items())
        origin = f"{file}: " if file else ""
        raise UserError(f"{origin}{listed} needs {how_to_add(extra)}")
