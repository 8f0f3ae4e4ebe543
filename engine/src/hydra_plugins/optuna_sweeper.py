"""A Hydra sweeper that lets Optuna choose the next settings; Hydra finds it by its folder.

Release 1.3 of the published plugin, `hydra-optuna-sweeper`, needs Optuna 2. Its 1.4.0rc3 supports
Optuna 4 and 5, but only with Hydra 1.4, which has no release yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from lockstep.building import build
from lockstep.errors import UserError
from lockstep.optional import import_optional
from lockstep.settings import check, check_choice

# What the value of a job is, and whether a large one is good.
DECIDING = ("checkpoint.monitor", "checkpoint.mode")


class OptunaSweeper(Sweeper):
    """Runs jobs one after another, each with settings that the results so far suggest.

    The arguments are those of the published plugin.

    Args:
        sampler: `_target_` and arguments of a sampler of Optuna.
        direction: of the value that a job returns: minimize or maximize; None: as
            `checkpoint.mode` says, else minimize.
        storage: URL of a database that keeps the study; None: memory.
        study_name: of the study in it, which continues if it exists.
        n_trials: number of jobs.
        params: setting -> search space, as on the command line, which takes precedence.
        n_jobs: jobs at once; only 1.
    """

    def __init__(
        self,
        sampler: Any,
        direction: str | None,
        storage: str | None,
        study_name: str | None,
        n_trials: Any,
        params: Mapping[str, Any] | None = None,
        n_jobs: int = 1,
    ) -> None:
        self.sampler = sampler
        self.direction = direction
        self.storage = storage
        self.study_name = study_name
        self.n_trials = n_trials
        self.params = dict(params or {})
        self.n_jobs = n_jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Store what Hydra passes to every sweeper."""
        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> float:
        """Search; return the best value found.

        Raises:
            UserError: Optuna isn't installed, a setting of the sweeper is wrong, or there is no
                setting to search in.
        """
        is_count = type(self.n_trials) is int and self.n_trials >= 1  # true is no number
        check("hydra.sweeper.n_trials", self.n_trials, is_count, "must be a whole number above 0")
        self.direction = self._direction()
        rule = "must be 1: each job has all devices, so they run one after another"
        check("hydra.sweeper.n_jobs", self.n_jobs, self.n_jobs == 1, rule)
        optuna = import_optional("hydra/sweeper=optuna", "optuna", "sweep")
        overrides = self._overrides(arguments)
        space = [override for override in overrides if override.is_sweep_override()]
        fixed = [str(item.input_line) for item in overrides if not item.is_sweep_override()]
        if not space:
            raise UserError("a sweep needs a setting to search in, like optim.lr=1e-3,3e-3")
        for override in space:
            _refuse_other_scale(override)
            _refuse_empty_interval(override)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = self._study(optuna)
        for number in range(self.n_trials):
            trial = study.ask()
            chosen = [f"{_name(override)}={self._suggest(trial, override)}" for override in space]
            (job,) = self.launcher.launch([[*fixed, *chosen]], initial_job_idx=number)
            value = math.nan if job.return_value is None else float(job.return_value)
            if math.isnan(value):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, value)
        return _report(study)

    def _direction(self) -> str:
        """Return whether a small or a large value is good, which `checkpoint.mode` also says."""
        assert self.config is not None, "Hydra calls `setup` first"
        mode = OmegaConf.select(self.config, "checkpoint.mode")
        monitor = OmegaConf.select(self.config, "checkpoint.monitor")
        usual = "maximize" if mode == "max" else "minimize"
        direction = self.direction or usual
        check_choice("hydra.sweeper.direction", direction, ("minimize", "maximize"))
        rule = (
            f"would search for the worst {monitor}: checkpoint.mode={mode}; set checkpoint.mode="
            f"{'max' if direction == 'maximize' else 'min'} too, or leave the direction out"
        )
        is_same = mode is None or direction == usual
        check("hydra.sweeper.direction", direction, is_same, rule)
        return direction

    def _study(self, optuna: Any) -> Any:
        """Return the study that `storage` has under this name, or a new one."""
        sampler = build(self.sampler)
        try:
            study = optuna.create_study(
                storage=self.storage,
                sampler=sampler,
                study_name=self.study_name,
                direction=self.direction,
                load_if_exists=True,
            )
        except Exception as error:  # of any database
            reason = " ".join(str(error).split())
            raise UserError(
                f"hydra.sweeper.storage={self.storage} cannot be opened ({reason}); name a "
                "database, as in sqlite:///study.db"
            ) from error
        stored = " and ".join(each.name.lower() for each in study.directions)
        rule = (
            f"but the study {self.study_name} in {self.storage} is to {stored}; set another "
            "hydra.sweeper.study_name, or that direction, with the checkpoint.mode that fits it"
        )
        check("hydra.sweeper.direction", self.direction, stored == self.direction, rule)
        return study

    def _suggest(self, trial: Any, override: Override) -> Any:
        """Draw a value.

        Raises:
            UserError: earlier trials of a stored study have drawn from values of another kind.
        """
        try:
            return _suggest(trial, override)
        except ValueError as error:
            raise UserError(
                f"{override.input_line}: the study {self.study_name} in {self.storage} has other "
                f"values for it ({error}); set another hydra.sweeper.study_name, or these values"
            ) from None

    def _overrides(self, arguments: list[str]) -> list[Override]:
        """Return the command line's overrides, after those presets that it doesn't replace."""
        parser = OverridesParser.create(config_loader=self.loader)
        replaced = {_name(each).lstrip("+~") for each in parser.parse_overrides(arguments)}
        presets = [f"{name}={space}" for name, space in self.params.items() if name not in replaced]
        return list(parser.parse_overrides([*presets, *arguments]))


def _name(override: Override) -> str:
    return str(override.get_key_element())


def _refuse_other_scale(override: Override) -> None:
    """Raise a `UserError` for a setting with which the jobs' values could not be compared."""
    name = _name(override)
    rule = "decides what is searched for; set one value, the same for all jobs"
    check(name, override.get_value_string(), name not in DECIDING, rule)


def _refuse_empty_interval(override: Override) -> None:
    """Raise a `UserError` for an interval in which Optuna can't draw."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return
    assert sweep.start is not None
    assert sweep.end is not None
    name = _name(override)
    if sweep.start > sweep.end:
        remedy = f"write {name}=interval({sweep.end},{sweep.start})"
        raise UserError(f"{override.input_line}: an interval starts at its lower end; {remedy}")
    if "log" in sweep.tags and sweep.start <= 0:
        raise UserError(f"{override.input_line}: with log, an interval must be above 0")


def _suggest(trial: Any, override: Override) -> Any:
    """Draw a value: one of those of a choice or range, or any number within an interval."""
    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        suggest = trial.suggest_float
        if all(isinstance(bound, int) for bound in (sweep.start, sweep.end)):
            suggest = trial.suggest_int
        return suggest(_name(override), sweep.start, sweep.end, log="log" in sweep.tags)
    assert isinstance(sweep, ChoiceSweep | RangeSweep), override
    values = [str(value) for value in override.sweep_string_iterator()]
    return trial.suggest_categorical(_name(override), values)


def _report(study: Any) -> float:
    if not any(trial.value is not None for trial in study.trials):
        print("\nno job of the sweep succeeded")
        return math.nan
    best = OmegaConf.to_yaml(OmegaConf.create(study.best_params)).replace("\n", "  ")
    print(f"\nbest of {len(study.trials)} jobs: {study.best_value:.4f} with {best}")
    return float(study.best_value)
