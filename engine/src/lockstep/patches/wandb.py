"""Private names of wandb, each with the reason. Version: wandb 0.31."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import wandb
import wandb.sdk.launch.inputs.internal  # `wandb.init` would import it, which takes a second

from lockstep.ranks.ranks import is_restart

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run


def quick_start() -> dict[str, Any]:
    """Return settings for restarted ranks: the list of installed packages is sent only once.

    Reading it takes a third of the start. There is no public setting.
    """
    return {"x_save_requirements": False} if is_restart() else {}


def guard_rows(run: Run, call: Callable[..., Any]) -> None:
    """Let `call` make the calls that log rows, wherever they come from.

    The hooks of `Run.watch` log in the middle of a backward pass, and users call `wandb.log`: both
    end up in `Run._log`, and have no public name in common.
    """
    run._log = partial(call, "log", run._log)  # type: ignore[method-assign]


def kill_service() -> None:
    """Kill wandb's process, so that nothing waits for it any more, in any thread.

    There is no public way to end it without its consent, and it may hang.
    """
    connection: Any = wandb.setup()._connection
    if connection is not None and connection._proc is not None:
        connection._proc._process.kill()
