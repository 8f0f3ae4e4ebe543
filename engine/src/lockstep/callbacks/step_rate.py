"""The learning rate as a function of the step, also after a resume."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class StepRate(LambdaLR):
    """The learning rate as a function of the step; a resumed run has this run's function."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step, with the rates that this run has for it."""
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        groups = self.optimizer.param_groups
        for group, base, factor in zip(groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
