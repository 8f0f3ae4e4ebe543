"""Optimizers of named weights: a YAML file can name a function here, or any other."""

from collections.abc import Iterable

from lockstep import Muon
from lockstep.settings import check_number
from lockstep.strategies import keep_own_settings
from torch import nn
from torch.optim import AdamW

NamedWeights = Iterable[tuple[str, nn.Parameter]]  # as `named_parameters` gives them
FUSED_DEVICES = {"cpu", "cuda", "mps"}  # with one kernel for a whole parameter group


def adamw(
    weights: NamedWeights,
    lr: float,
    weight_decay: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
) -> AdamW:
    """Return AdamW (Loshchilov & Hutter 2019), which decays no vectors.

    It has two groups, in this order: trainable weights of two or more dimensions (matrices and
    embeddings), which decay, and vectors (biases and norms), which don't. Each group keeps the
    order of `weights`, so a saved state fits any later run of the same model.

    Args:
        weights: on their device already.
        lr: peak learning rate.
        weight_decay: decoupled, so `lr` multiplies it.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        eps: added to the denominator.

    Raises:
        UserError: an argument is out of range.
    """
    _check(weight_decay, beta1, beta2, eps)
    trained = [weight for _, weight in weights if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim >= 2]
    vectors = [weight for weight in trained if weight.ndim < 2]
    has_kernels = all(weight.device.type in FUSED_DEVICES for weight in trained)
    optimizer = AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        # None: one kernel per operation for all tensors, if the device has such kernels.
        fused=True if has_kernels else None,
    )
    optimizer.register_load_state_dict_pre_hook(keep_own_settings)
    return optimizer


def muon(
    weights: NamedWeights,
    lr: float,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    head_lr_fraction: float = 0.2,
) -> Muon:
    """Return Muon for the matrices of a model's `blocks`, and AdamW for the rest, in one optimizer.

    It tells them by name and shape. A matrix is a weight of two dimensions somewhere in `blocks`,
    such as `blocks.0.mlp.expansion.weight`; the head is `output.weight`. A prefix, such as
    `model.`, doesn't matter. There are always three groups, in this order: matrices, head, rest.
    Each keeps the order of `weights`, so a saved state fits any later run of the same model.

    Args:
        weights: on their device already.
        lr: peak learning rate.
        weight_decay: decoupled, of the matrices.
        beta1: AdamW's decay of the mean of gradients.
        beta2: AdamW's decay of the mean of squared gradients.
        eps: added to AdamW's denominator.
        head_lr_fraction: the head's rate as a fraction of `lr`.

    Raises:
        UserError: an argument is out of range.
    """
    _check(weight_decay, beta1, beta2, eps)
    check_number("optim.head_lr_fraction", head_lr_fraction, above=0)
    matrices, head, rest = [], [], []
    for name, weight in weights:
        if not weight.requires_grad:
            continue
        *outside, module, kind = ["", *name.split(".")]
        if "blocks" in outside and weight.ndim == 2:
            matrices.append(weight)
        elif (module, kind) == ("output", "weight"):
            head.append(weight)
        else:
            rest.append(weight)
    groups = [
        {"params": matrices, "lr": lr, "muon": True, "weight_decay": weight_decay},
        {"params": head, "lr": head_lr_fraction * lr, "muon": False, "weight_decay": 0.0},
        {"params": rest, "lr": lr, "muon": False, "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, betas=(beta1, beta2), eps=eps)
    optimizer.register_load_state_dict_pre_hook(keep_own_settings)
    return optimizer


def _check(weight_decay: float, beta1: float, beta2: float, eps: float) -> None:
    """Raise a `UserError` if a setting that both optimizers have is out of range."""
    check_number("optim.weight_decay", weight_decay, at_least=0)
    check_number("optim.beta1", beta1, at_least=0, below=1)
    check_number("optim.beta2", beta2, at_least=0, below=1)
    check_number("optim.eps", eps, above=0)
