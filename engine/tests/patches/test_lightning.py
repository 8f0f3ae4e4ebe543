"""What Lightning doesn't offer in public.

A test of changed behavior fails once Lightning no longer needs the change.
A test of a private name fails once Lightning has something else under it.
"""

import signal

import lightning
import pytest

from lockstep.patches import lightning as lightning_patches


@pytest.fixture
def trainer():
    return lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)


@pytest.fixture(autouse=True)
def handler():
    """Restore the handler of SIGTERM; return a function that tells the present one."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda: signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_lightning_handles_sigterm_except_in_our_context(trainer, handler):
    before = handler()
    connector = trainer._signal_connector
    with lightning_patches.without_sigterm_broadcasts(trainer):
        connector.register_signal_handlers()
        assert handler() is before
        assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None
    connector.register_signal_handlers()
    assert connector._sigterm_notifier_fn in handler().signal_handlers
    connector.teardown()
    assert handler() is before


def test_a_trainer_is_as_lightning_made_it_after_our_context(trainer):
    parts = (trainer._signal_connector, trainer.fit_loop.epoch_loop)
    before = [set(vars(part)) for part in parts]
    with lightning_patches.without_sigterm_broadcasts(trainer):
        assert [set(vars(part)) for part in parts] != before
    assert [set(vars(part)) for part in parts] == before


def test_only_one_teardown_is_skipped_and_gives_signals_their_handlers_again(trainer):
    steps = []
    trainer.strategy.teardown = lambda: steps.append("strategy")
    trainer._signal_connector.teardown = lambda: steps.append("signals")
    lightning_patches.skip_teardown(trainer)
    trainer._teardown()
    assert steps == ["signals"]
    steps.clear()
    trainer._teardown()
    assert steps == ["strategy", "signals"]
