"""Whether a run's settings changed when it was resumed: earlier steps then had others."""

from __future__ import annotations

import re

from lockstep.checkpoints.reading import (
    checkpoint_path,
    checkpoints_in,
    read_checkpoint,
    step_of,
)
from lockstep.damaged_files import read_informative_text
from lockstep.errors import UserError
from lockstep.run.directory import RunDirectory, flat

CHANGE = re.compile(r"^\S+ \S+  (\S+): ", re.MULTILINE)  # a line of overrides.log
# Settings that change neither the weights nor the rows of the log.
OTHERS = (
    *("run_dir", "run_name", "resume", "resume_force", "trust_run_dir", "verbosity", "kept"),
    *("logger", "callbacks", "checkpoint", "guard", "memory", "launch", "strategy"),
    *("trainer.devices", "trainer.num_nodes", "trainer.accelerator"),
    *("val_every", "peak_tflops", "data.root"),
)


def refuse_changed_settings(run: RunDirectory, start: int) -> None:
    """Raise a `UserError` if the steps after `start` had other settings than the last ones."""
    if start:
        content = read_checkpoint(checkpoint_path(run.checkpoints, start))
        before = dict(flat(content["config"]))
        after = dict(flat(run.values()))
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    else:
        changed = CHANGE.findall(read_informative_text(run.overrides))
    changed = [name for name in dict.fromkeys(changed) if matters(name)]
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


def matters(name: str) -> bool:
    """Return whether a setting changes what is computed."""
    return not any(name == other or name.startswith(f"{other}.") for other in OTHERS)
