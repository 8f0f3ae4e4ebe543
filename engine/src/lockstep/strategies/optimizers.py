"""What our strategies add to the optimizers that a module returns."""

import weakref
from typing import Any, Protocol, runtime_checkable

from lightning import Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UserError
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


def keep_own_settings(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the settings of `optimizer`, which a run may change on resume.

    An optimizer calls it with each state that it loads, once it is registered:
    `optimizer.register_load_state_dict_pre_hook(keep_own_settings)`. A rate that a scheduler
    changes is the saved one: schedulers of torch don't set it again when they are restored.

    Raises:
        UserError: the state is of another optimizer.
    """
    if len(state_dict["param_groups"]) != len(optimizer.param_groups):
        raise UserError(
            f"optim: the checkpoint has no state of {type(optimizer).__name__}, but of another "
            "optimizer; use the same, or start a new run with its weights: init_from=CHECKPOINT"
        )
    groups = []
    for saved, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        group = {**ours, "params": saved["params"]}
        if "initial_lr" in ours:  # a scheduler has put it there
            group["lr"] = saved["lr"]
        groups.append(group)
    return {**state_dict, "param_groups": groups}
