"""The optimizer: which parameters decay, and which kernel updates them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lockstep_gpt.errors import defined_in
from lockstep_gpt.training.matrix_placement import MatrixPlacement, ReplicatedMatrices
from lockstep_gpt.training.muon import Muon
from lockstep_gpt.training.optim_settings import OptimConfig
from lockstep_gpt.training.owned_matrices import OwnedMatrices
from lockstep_gpt.training.sharded_matrices import ShardedMatrices

if TYPE_CHECKING:  # it imports Lightning, which takes seconds, and plans need none
    from lightning.pytorch.strategies import Strategy

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
        build = defined_in(module, "build_optimizer", "training/muon.py")
        return cast(torch.optim.Optimizer, build(model, config, lr))
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


def place_matrices(
    optimizer: torch.optim.Optimizer, strategy: Strategy, compiled: bool = False
) -> None:
    """Let ranks share Muon's work, on replicas or shards; other optimizers stay as they are.

    With exact sums, the matrices that a rank works on may not change their bits. Compiled code may
    add the numbers of one matrix in another order than those of a stack, and so may a GPU.
    """
    if not isinstance(optimizer, Muon):
        return
    from lockstep_gpt.distributed.exact_sums import AddsGradients
    from lockstep_gpt.distributed.strategies import layout_of

    layout = layout_of(strategy)
    is_exact = isinstance(strategy, AddsGradients) and strategy.exact_threads is not None
    compiled = compiled and not is_exact
    one_by_one = is_exact and strategy.root_device.type == "cuda"
    placement: MatrixPlacement = ReplicatedMatrices(compiled, one_by_one)
    if not layout.has_replicas:
        placement = ShardedMatrices(compiled, layout.tensor_part)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        placement = OwnedMatrices(optimizer.matrices, compiled, one_by_one)
    optimizer.placement = placement


def state_bytes(model: nn.Module, config: OptimConfig) -> int:
    """Return the bytes of the weights, and of the moments that the optimizer keeps of them."""
    optimizer = build_optimizer(model, config, lr=0.0)
    size: int = sum(weight.nbytes for weight in model.state_dict().values())
    for group in optimizer.param_groups:
        moments = 1 if group.get("muon") else 2
        size += sum(moments * weight.nbytes for weight in group["params"])
    return size


def keep_own_settings(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return a saved state with the settings of `optimizer`, which a run may change on resume."""
    groups = [
        {**ours, "params": saved["params"]}
        for saved, ours in zip(state_dict["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {**state_dict, "param_groups": groups}
