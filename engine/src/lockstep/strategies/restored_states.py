"""What a resumed run must not share with the file that it was read from."""

import torch
from torch import Tensor


def copy_restored_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy the state that `load_state_dict` has put in `optimizer`, one tensor after the other.

    torch takes over a saved tensor of the right type and device, but ours is a mapped file. Later
    states in memory overwrite it.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[name] = value.clone()
