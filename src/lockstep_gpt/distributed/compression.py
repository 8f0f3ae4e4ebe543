"""`strategy.comm_hook`: DDP that sends gradients between ranks in fewer bytes."""

from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lockstep_gpt.config import Config, UserError
from lockstep_gpt.training.strategies import DDPStrategy


class CompressedDDP(DDPStrategy):
    """DDP with the hook on CPUs too, where Lightning does not register it."""

    def _register_ddp_hooks(self) -> None:
        wrapped: Any = self.model
        wrapped.register_comm_hook(self._ddp_comm_state, self._ddp_comm_hook)


fp16 = partial(CompressedDDP, ddp_comm_hook=default_hooks.fp16_compress_hook)
bf16 = partial(CompressedDDP, ddp_comm_hook=default_hooks.bf16_compress_hook)


def powersgd(**settings: Any) -> CompressedDDP:
    """Return DDP that sends low-rank approximations (Vogels et al. 2019)."""
    state = powerSGD_hook.PowerSGDState(process_group=None)
    hook = powerSGD_hook.powerSGD_hook
    return CompressedDDP(ddp_comm_hook=hook, ddp_comm_state=state, **settings)


def refuse_without_memory(config: Config, own: Path) -> None:
    """Raise a `UserError` for a run that would resume without its error memory."""
    if config.strategy.get("comm_hook") == "powersgd":
        raise UserError(f"{own} lacks the error memory of powersgd; resume_force=true resets it")
