"""Private names of Lightning, each with the reason. Versions: Lightning 2.6."""

from typing import Any

from lightning import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector

from lockstep_gpt.torch_patches import limit_waits


class StepAxis(_LoggerConnector):
    """Logs what users log at the number of its step, counted from 1; Lightning counts from 0."""

    @property
    def should_update_logs(self) -> bool:
        """Return whether values logged now reach the loggers."""
        trainer: Any = self.trainer
        if not trainer.training:
            return super().should_update_logs
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        return bool(step % trainer.log_every_n_steps == 0 or trainer.should_stop)

    def on_batch_start(self, *arguments: Any) -> None:
        """Set the step's number: Lightning counts one twice on a resume after a validation."""
        trainer: Any = self.trainer
        if trainer.training:
            trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step + 1
        super().on_batch_start(*arguments)


def count_logged_steps_from_one(trainer: Trainer) -> _LoggerConnector:
    """Give the Trainer our axis; return its original connector, for `restore_axis`."""
    original = trainer._logger_connector
    axis = StepAxis(trainer)
    vars(axis).update(vars(original))
    trainer._logger_connector = axis
    return original


def restore_axis(trainer: Trainer, original: _LoggerConnector) -> None:
    """Give the Trainer its original connector again, with what was logged meanwhile."""
    vars(original).update(vars(trainer._logger_connector))
    trainer._logger_connector = original
    # A validation after training belongs to the last step, not to the next.
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def without_signal_handlers(trainer: Trainer) -> None:
    """Keep a Trainer from installing its handler of SIGTERM; there is no public way.

    It broadcasts to other ranks inside the handler, and so waits for them in the middle of a step.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether more micro-batches come before the update; Lightning has no public answer."""
    return bool(trainer.fit_loop._should_accumulate())


def validation_follows(trainer: Trainer) -> bool:
    """Return whether a validation follows the micro-batch that ends; there's no public answer."""
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None, "there is one while it trains"
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a checkpoint would have; the public way also writes it. Every rank must call it.

    The values are those of training itself: copy them before the next step.
    """
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def register_communication_hook(strategy: DDPStrategy) -> None:
    """Register a strategy's communication hook; Lightning does so only for GPUs."""
    wrapped: Any = strategy.model
    wrapped.register_comm_hook(strategy._ddp_comm_state, strategy._ddp_comm_hook)


def skip_teardown(trainer: Trainer) -> None:
    """Let a Trainer that handles an exception leave its metrics and its module on the device.

    It would copy them to the host: a copy that waits for a kernel, which waits for a lost peer.
    """
    patched: Any = trainer
    patched._teardown = trainer._signal_connector.teardown  # gives signals their handlers again


def limit_waits_in_mesh(strategy: ModelParallelStrategy) -> None:
    """Let the groups of a strategy's mesh wait as long as that of all ranks.

    Lightning tells the limit only to the latter; torch gives the others its own default.
    """
    assert strategy._timeout is not None
    for group in strategy.device_mesh.get_all_groups():
        limit_waits(group, strategy._timeout)
