"""The optimizer: which parameters decay, and which kernel updates them."""

import importlib
from typing import cast

import torch
from torch import Tensor, nn

from lockstep_gpt.training.optim_settings import OptimConfig

FUSED_DEVICES = {"cpu", "cuda", "mps"}  # with one kernel for a whole parameter group


def build_optimizer(
    model: nn.Module, config: OptimConfig, lr: float, fused: bool = True
) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov & Hutter 2019), or the optimizer of module `optim.algorithm`.

    AdamW has two groups, in this order: trainable tensors of two or more dimensions (matrices and
    embeddings), which decay, and vectors (biases and norms), which don't. Each group keeps the
    model's own order, so a saved state fits any later run of the same model.

    `model` is already on its device. `lr` is the peak, after scaling; `config.lr` is not read.
    """
    if config.algorithm != "adamw":
        module = importlib.import_module(f"{__package__}.{config.algorithm}")
        return cast(torch.optim.Optimizer, module.build_optimizer(model, config, lr))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_kernels = all(parameter.device.type in FUSED_DEVICES for parameter in trained)
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    decays = {"params": matrices, "weight_decay": config.weight_decay}
    return torch.optim.AdamW(
        [decays, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        # None: one kernel per operation for all tensors, if the device has such kernels.
        fused=True if fused and has_kernels else None,
    )


def copy_restored_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy the state that `load_state_dict` has put in `optimizer`, one tensor after the other.

    torch takes over a saved tensor of the right type and device, but ours is a mapped file.
    """
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.device.type == "cpu":
                state[name] = value.clone()
