"""Private names of Lightning, each with the reason. Versions: Lightning 2.6.

Whatever is changed belongs to one Trainer, and is undone: others are as Lightning made them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning import Trainer


@contextmanager
def without_sigterm_broadcasts(trainer: Trainer) -> Iterator[None]:
    """Keep a Trainer from telling other ranks of a SIGTERM in this context; there is no public way.

    Its handler broadcasts inside the signal, and so waits for other ranks in the middle of a step.
    A handler that replaces it afterward, in the first hook, would come too late for a signal in
    between. And in each micro-batch, its loop broadcasts whether rank 0 got one, which waits for
    the device (Lightning#21487).
    """
    connector: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = _do_nothing
    loop._broadcast_sigterm_tensor = _do_nothing
    try:
        yield
    finally:
        del connector.register_signal_handlers
        del loop._broadcast_sigterm_tensor


def synchronizes_batchnorm(trainer: Trainer) -> bool:
    """Return whether `Trainer(sync_batchnorm=True)` was asked for; it keeps that to itself."""
    strategy: Any = trainer.strategy
    return getattr(strategy, "_layer_sync", None) is not None


def wait_of(trainer: Trainer, default: float) -> float:
    """Return how many seconds a rank of a Trainer's strategy waits for another one.

    Args:
        trainer: whose strategy keeps that to itself.
        default: of a strategy that has no such limit.
    """
    wait = getattr(trainer.strategy, "_timeout", None)
    return wait.total_seconds() if wait else default


def _do_nothing() -> None:
    """Stand for a method of Lightning."""


def validation_follows(trainer: Trainer) -> bool:
    """Return whether a validation follows the micro-batch that ends; there's no public answer."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None, "there is one while it trains"
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint would have. Every rank must call this.

    The public `Trainer.save_checkpoint` passes it to rank 0 alone, and ends in a barrier, which
    waits for the device. The values are those of training itself: copy them before the next step.
    """
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def epoch_sums(trainer: Trainer) -> dict[str, Any]:
    """Return what `self.log` has added up in this epoch of training, by the names of the logs.

    Each is a torchmetrics metric. Lightning saves none of them.
    """
    results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
    return results


def count_logged_steps(trainer: Trainer) -> None:
    """Set the number of steps by which Lightning decides when to log, and at which step.

    Lightning keeps it apart from its public `global_step`. Before the first micro-batch of a run
    that was resumed, it may be one less, depending on when the state was saved.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def skip_teardown(trainer: Trainer) -> None:
    """Let a Trainer that handles an exception leave its metrics and its module on the device.

    It would copy them to the host: a copy that waits for a kernel, which waits for a lost peer.
    """
    patched: Any = trainer

    def restore_signal_handlers() -> None:
        del patched._teardown  # only once: another fit of this Trainer ends as usual
        trainer._signal_connector.teardown()

    patched._teardown = restore_signal_handlers


def acts_at_epochs(stopping: Any) -> bool:
    """Return whether an early stopping looks at its metric at the end of epochs, as set up."""
    return bool(stopping._check_on_train_epoch_end)
