"""The learning rate as a function of the step, also after a resume."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR


class StepRate(LambdaLR):
    """The learning rate as a function of the step; a resumed run has this run's function.

        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> rate = lockstep.StepRate(optimizer, lambda step: 1 / (1 + step))
        >>> optimizer.step()
        >>> rate.step()
        >>> rate.get_last_lr()
        [0.25]

    Args:
        optimizer: whose groups' rates are changed.
        lr_lambda: returns a factor of each group's own rate for a step, or one such function for
            each group.
        last_epoch: the step to begin after; -1: at the first.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step, with the rates that this run has for it."""
        super().load_state_dict({**state_dict, "base_lrs": self.base_lrs})
        groups = self.optimizer.param_groups
        for group, base, factor in zip(groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
