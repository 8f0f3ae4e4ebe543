"""Computes steps of a run again, in a directory of its own, with the run's frozen settings.

Steps before a resume that changed these settings are refused.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import project
from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    read_checkpoint,
    step_of,
)
from lockstep.checkpoints.sums import files_of
from lockstep.damaged_files import read_informative_text
from lockstep.errors import RunError, UserError
from lockstep.launch.hydra_job import HYDRA_FILE
from lockstep.run.directory import RunDirectory, flat
from lockstep.settings import node_of

NAMES = "tensors.json"  # in a replay: the names of the tensors, in the optimizer's order
ALL = 10**6  # checkpoints to keep
# Callbacks of a run that its replay doesn't need: they only show, note, or check something.
LEFT_OUT = ("progress", "sample", "environment", "replays", "trace")
# Settings by which a replay changes what takes part in the run.
NEEDED = ("trainer", "callbacks", "checkpoint", "logger", "log_every")
CALLBACKS = "lockstep.evidence.callbacks"
TRACE = "lockstep.callbacks.trace.Trace"

CHANGE = re.compile(r"^\S+ \S+  (\S+): ", re.MULTILINE)  # a line of overrides.log
# Settings that change neither the weights nor the rows of the log.
WITHOUT_EFFECT = (
    *("run_dir", "run_name", "resume", "resume_force", "trust_run_dir", "verbosity", "kept"),
    *("logger", "callbacks", "checkpoint", "guard", "memory", "launch", "strategy"),
    *("trainer.devices", "trainer.num_nodes", "trainer.accelerator"),
    *("val_every", "peak_tflops", "data.root"),
)


@dataclass(frozen=True)
class Steps:
    """Which steps of a run to compute again.

    Args:
        run: the run.
        start: completed steps at the start; 0, or those of a saved state.
        end: completed steps at the end.
        saves: steps after which to save.
        devices: of this machine.
        has_gpu: whether they are GPUs.
        micro_size: samples of a micro-batch, whose dropout depends on it; None: as set.
    """

    run: RunDirectory
    start: int
    end: int
    saves: list[int]
    devices: int
    has_gpu: bool
    micro_size: int | None


def replay(steps: Steps, folder: Path, noise: float | None = None) -> RunDirectory:
    """Train the steps in the new `folder`, and return that run.

    Args:
        steps: what to compute.
        folder: for the replay's files.
        noise: the relative size of rounding errors to add to the weights of each step; see
            `RoundingNoise`.

    Raises:
        RunError: training failed.
    """
    directory = RunDirectory(folder)
    directory.create(_values(steps, folder, noise))
    if steps.run.decided.exists():  # such as which tokens it trains with
        shutil.copyfile(steps.run.decided, directory.decided)
    if (steps.run.path / HYDRA_FILE).exists():  # else the command writes its own
        (folder / HYDRA_FILE).parent.mkdir()
        shutil.copyfile(steps.run.path / HYDRA_FILE, folder / HYDRA_FILE)
    if steps.start:
        directory.checkpoints.mkdir()
        for path in files_of(checkpoint_path(steps.run.checkpoints, steps.start)):
            (directory.checkpoints / path.name).symlink_to(path.resolve())
    words = [f"run_dir={folder}", "resume=auto", "trust_run_dir=true"]
    command = project.current().command("train", *words)
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        lines = [*filter(None, outcome.stderr.splitlines())] or [f"exit {outcome.returncode}"]
        raise RunError(f"the steps of {steps.run.path} could not be computed again: {lines[-1]}")
    return directory


def _values(steps: Steps, folder: Path, noise: float | None) -> dict[str, Any]:
    """Return the settings of the run, without what only its first time needed."""
    values = steps.run.values()
    lacking = [name for name in NEEDED if name not in values]
    if lacking:
        raise UserError(
            f"{steps.run.path} has no setting {lacking[0]}, by which its steps could be computed "
            f"again; the program must take {', '.join(NEEDED)} from its settings"
        )
    accelerator = "cuda" if steps.has_gpu else "cpu"
    values["trainer"] |= {"accelerator": accelerator, "devices": steps.devices, "num_nodes": 1}
    if not steps.has_gpu and node_of(values, "strategy").get("process_group_backend") == "nccl":
        values["strategy"]["process_group_backend"] = None
    if steps.micro_size is not None:
        values["batch"]["micro_size"] = steps.micro_size
    if steps.start and "init_from" in values:
        values["init_from"] = None  # a saved state has the weights
    values["run_dir"] = str(folder)
    values["logger"] = {}
    values["callbacks"] = _callbacks(steps, values, noise)
    values["checkpoint"] |= {
        "every": None,
        "keep_last": ALL,
        "keep_best": 0,
        "background": False,
        "copy_to": None,
    }
    values["memory"] = False
    return values


def _callbacks(steps: Steps, values: dict[str, Any], noise: float | None) -> dict[str, Any]:
    """Return the run's own callbacks that may change a result, and those of the replay."""
    own: dict[str, Any] = values.get("callbacks") or {}
    chosen = {name: node for name, node in own.items() if name not in LEFT_OUT}
    saves = {"saves": steps.saves, "end": steps.end}
    chosen["verify_saves"] = {"_target_": f"{CALLBACKS}.ReplayedSaves", **saves}
    if noise is not None:
        errors = {"seed": values.get("seed", 0), "size": noise}
        chosen["verify_noise"] = {"_target_": f"{CALLBACKS}.RoundingNoise", **errors}
    elif steps.run.trace.exists():
        chosen["trace"] = {"_target_": TRACE, "every": values["log_every"]}
    return chosen


def refuse_changed_settings(run: RunDirectory, start: int) -> None:
    """Raise a `UserError` if the steps after `start` had other settings than the last ones."""
    if start:
        content = read_checkpoint(checkpoint_path(run.checkpoints, start))
        before = dict(flat(content["config"]))
        after = dict(flat(run.values()))
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    else:
        changed = CHANGE.findall(read_informative_text(run.overrides))
    changed = [name for name in dict.fromkeys(changed) if _matters(name)]
    if not changed:
        return
    later = [step_of(path) for path in checkpoints_in(run.checkpoints)]
    remedy = f"start after the change, with --from one of {', '.join(map(str, later[:-1]))}"
    if len(later) == 1:
        remedy = "keep more states of such a run, with checkpoint.keep_last"
    raise UserError(
        f"{run.path} changed {', '.join(changed)} when it was resumed, so its settings can't "
        f"compute the steps after {start}; {remedy}"
    )


def _matters(name: str) -> bool:
    """Return whether a setting changes what is computed."""
    return not any(name == other or name.startswith(f"{other}.") for other in WITHOUT_EFFECT)
