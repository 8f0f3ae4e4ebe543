"""What one rank does with the function of a program: calls it, and tells how that ended."""

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log, setup_globals
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from lockstep import stop_signals
from lockstep.errors import UserError
from lockstep.exits import Exit, after_signal
from lockstep.launch import hydra_job
from lockstep.ranks.ranks import LONGEST_WAIT, Ranks, lost_peers
from lockstep.run import last_line
from lockstep.run.directory import RunDirectory
from lockstep.run.failures import report_failure
from lockstep.run.rank_output import drop_rank_log, routed_output
from lockstep.run.run import Run
from lockstep.settings import check_number, node_of
from lockstep.strategies.matrix_products import restored_afterward

logger = logging.getLogger(__name__)


def call(function: Callable[..., Any], directory: RunDirectory, store: Any = None) -> int:
    """Call a program's function as one rank of a run, and return the rank's exit status.

    Args:
        function: takes the frozen configuration, and perhaps the `Run`.
        directory: of the run.
        store: where the ranks of a launcher have met; None: they meet now, or there is only one.
    """
    ranks = Ranks.from_environment()
    values = directory.resolved()
    output = routed_output(directory, ranks, values.get("verbosity", "normal"))
    with output as terminal, restored_afterward():
        run = None
        try:
            _restore_hydra(directory, ranks)
            refuse_wrong_wait(values)
            run = _run_of(directory, values, ranks)
            run.terminal = terminal
            run.join(**_connection(values), store=store)
            config = frozen_config(directory, ranks)
            arguments = [config, run] if takes_run(function) else [config]
            value = function(*arguments)
            run.handled()
            run.conclude("done", _plain(value))
        except stop_signals.Stopped as stopped:
            if run is not None:
                run.conclude("stopped", saved=stopped.saved)
            if ranks.rank == 0 and stopped.saved:
                logger.info("%s; %s", stopped, last_line.way_on(directory))
            return after_signal(stopped.signum)
        except KeyboardInterrupt:  # a Ctrl-C before training
            raise
        except BaseException as raised:
            error = mistake_of_node(raised)
            if run is not None:
                return _end_failed(run, error)
            status = report_failure(directory, ranks, error, terminal)
            last_line.show_end_of_rank(directory, ranks.rank, status, terminal)
            return status
    drop_rank_log(directory, ranks)
    return Exit.DONE


def _end_failed(run: Run, error: BaseException) -> int:
    """End the run after an exception of this rank; return the rank's exit status."""
    run.returned()
    signum = stop_signals.received.first
    if signum is not None and (lost_peers(error) or stop_signals.ended_by_signal(error)):
        run.forget_first_step()
        return after_signal(signum)  # which lost peers got, too
    run.conclude("failed", saved=False)
    status = run.status_of(error)
    last_line.show_end_of_rank(run.directory, run.ranks.rank, status, run.terminal)
    return status


def mistake_of_node(error: BaseException) -> BaseException:
    """Return what a class says of an argument that Hydra gave to it, by the setting's full name."""
    if isinstance(error, InstantiationException):
        cause, text = error.__cause__, str(error)
    else:  # Hydra 1.4 leaves an exception as it is, and adds a note
        cause, text = error, "\n".join(getattr(error, "__notes__", ()))
    if not isinstance(cause, UserError) or "full_key: " not in text:
        return error
    node = text.rpartition("full_key: ")[2].strip()
    joint = "." if re.match(r"\w+=", str(cause)) else ": "
    return UserError(f"{node}{joint}{cause}")


def takes_run(function: Callable[..., Any]) -> bool:
    """Return whether a program's function takes the `Run`, as its second argument."""
    return len(inspect.signature(function).parameters) > 1


def frozen_config(directory: RunDirectory, ranks: Ranks) -> DictConfig:
    """Return the frozen configuration, closed as Hydra's is: a misspelled name is an error.

    Its Trainer has the machines that there are: a launcher may have started more than it says, and
    a run may go on without one. Lightning shares the samples among as many.
    """
    config = OmegaConf.create(directory.values())
    trainer = config.get("trainer")
    if isinstance(trainer, DictConfig) and trainer.get("num_nodes", 1) != ranks.num_nodes:
        trainer.num_nodes = ranks.num_nodes
    OmegaConf.set_struct(config, True)
    return config


def _run_of(directory: RunDirectory, values: dict[str, Any], ranks: Ranks) -> Run:
    return Run(
        directory.path,
        directory.values(),
        resume=values.get("resume", "none"),
        kept=values.get("kept", ()),
        force=bool(values.get("resume_force", False)),
        ranks=ranks,
        timeout=_strategy_of(values).get("timeout_seconds", LONGEST_WAIT),
    )


def refuse_wrong_wait(values: dict[str, Any]) -> None:
    """Raise a `UserError` for a limit with which ranks can't even meet."""
    wait = _strategy_of(values).get("timeout_seconds", LONGEST_WAIT)
    check_number("strategy.timeout_seconds", wait, above=0)


def _connection(values: dict[str, Any]) -> dict[str, Any]:
    """Return how the ranks connect, as the Trainer and the strategy would connect them."""
    trainer = node_of(values, "trainer")
    backend = _strategy_of(values).get("process_group_backend")
    return {"accelerator": trainer.get("accelerator", "cpu"), "backend": backend}


def _strategy_of(values: dict[str, Any]) -> dict[str, Any]:
    return node_of(values, "strategy") or node_of(node_of(values, "trainer"), "strategy")


def _restore_hydra(directory: RunDirectory, ranks: Ranks) -> None:
    """Restore what Hydra's own `main` sets up: its configuration, and a job's logging."""
    setup_globals()
    config = hydra_job.recorded(directory, directory.values())
    config.hydra.runtime.output_dir = str(directory.path.absolute())
    HydraConfig.instance().set_config(config)
    if ranks.rank == 0:
        configure_log(config.hydra.job_logging, config.hydra.verbose)


def _plain(value: Any) -> Any:
    """Return what a function has returned, if a file can hold it: a number, or several."""
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1:
        return value.item()
    return None
