"""What our strategies add to the optimizers that a module returns."""

import weakref
from typing import Protocol, runtime_checkable

from lightning import Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn

from lockstep.strategies.restored_states import copy_restored_state

COMPILED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that `place` has compiled


def is_compiled(module: nn.Module) -> bool:
    """Return whether `place` has compiled the module, or a part of it."""
    return any(part in COMPILED for part in module.modules())


@runtime_checkable
class SharesWork(Protocol):
    """An optimizer whose work the ranks can share, such as `Muon`."""

    def share_work(self, strategy: Strategy, compiled: bool) -> None:
        """Share the work among the ranks of `strategy`; compute it in compiled code if asked."""


class PreparesOptimizers(Strategy):
    """A mixin of strategies: ranks share an optimizer's work, wherever an optimizer allows it.

    Also, no optimizer keeps a state in the file that it was restored from.
    """

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers, as Lightning does, and prepare them."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        compiled = is_compiled(self.lightning_module)
        for optimizer in self.optimizers:
            if isinstance(optimizer, SharesWork):
                optimizer.share_work(self, compiled)
            optimizer.register_load_state_dict_post_hook(copy_restored_state)
