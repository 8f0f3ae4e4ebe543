"""Warnings before training about settings that will not have the intended effect."""

import logging
import os
from typing import Any

import torch

from lockstep_gpt.config import Config
from lockstep_gpt.model.functional import SHORT, shares_heads
from lockstep_gpt.torch_patches import attention_kernel
from lockstep_gpt.training.receipt import times
from lockstep_gpt.training.schedule import Schedule

logger = logging.getLogger(__name__)

PLAIN_PRODUCTS = "plain matrix products"
EPOCHS = 4  # teach as much as the same number of new tokens (Muennighoff et al. 2023, section 1)
OLDEST_TORCH = (2, 12)  # as in pyproject.toml; without pip, as in some containers, it may be older
# Compute capabilities where torch takes cuDNN's attention, if cuDNN is newer than 9.15.0: Hopper,
# where FlashAttention costs 9 to 10 % of a run (nanochat's log, 11 January 2026), and Blackwell.
PREFERS_CUDNN = {(9, 0), (10, 0), (10, 3)}
HIGH_SCALE = 4  # times the tuned rate; without warmup, it often diverges (Goyal et al. 2017)


def advise(config: Config, epochs: float | None) -> None:
    """Warn of an old torch, of slow attention, and of text that is repeated often."""
    warn_of_old_torch(config)
    if not config.trains_gpt:
        return
    warn_of_slow_attention(config)
    if epochs is not None and epochs > EPOCHS:
        logger.warning(
            "the budget repeats the same data %s times; beyond %d epochs, repeats teach less and "
            "less (Muennighoff et al. 2023): use more data, or fewer steps",
            times(epochs),
            EPOCHS,
        )


def warn_of_old_torch(config: Config) -> None:
    """Warn if torch is so old that compiled code may be wrong.

    2.11 gives an `autograd.Function` that returns a tensor changed in place no gradient
    (pytorch#180642). Ours avoid that, but those of other code may not.
    """
    installed = tuple(int(number) for number in torch.__version__.split(".")[:2])
    if config.compile and installed < OLDEST_TORCH:
        logger.warning(
            "torch %s is older than %d.%d, the oldest that is tested, and with compile=true can "
            "compute wrong gradients of a model of your own: install a newer one, or set "
            "compile=false",
            torch.__version__,
            *OLDEST_TORCH,
        )


def attention(config: Config) -> str:
    """Return how training computes attention here; see `fused_attention`."""
    if config.trainer.get("accelerator", "cpu") == "cpu" and is_plain(config):
        return PLAIN_PRODUCTS
    return fused_attention(config)


def is_plain(config: Config) -> bool:
    """Return whether plain products compute attention on a CPU."""
    return config.model.block_size <= SHORT


def attention_line(config: Config) -> str:
    """Return the receipt's line on attention: on GPUs, also cuDNN's version, which decides it."""
    version = cudnn_version()
    if config.trainer.get("accelerator", "cpu") != "cuda" or not version:
        return attention(config)
    return f"{attention(config)}, with cuDNN {version} installed"


def cudnn_version() -> str:
    """Return the version of cuDNN that torch has loaded, such as 9.15.1; empty without cuDNN."""
    cudnn: Any = torch.backends.cudnn
    number = cudnn.version()
    if number is None:
        return ""
    thousands = 10_000 if number >= 90_000 else 1000  # of the major version, from 9 on
    return f"{number // thousands}.{number % thousands // 100}.{number % 100}"


def fused_attention(config: Config, is_masked: bool = False) -> str:
    """Return the kernel that torch chooses for attention in training, such as `flash` or `cudnn`.

    `math` is the slow one that always works. The choice depends on the device, the precision, the
    width of a head, dropout, and whether a mask says what a query sees.
    """
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16, "64-true": torch.float64}
    model = config.model
    device = config.trainer.get("accelerator", "cpu")
    if device == "mps":
        device = "meta"  # Apple GPUs have only one kernel
    T = model.block_size
    q = torch.empty(
        (1, model.n_head, T, model.n_embd // model.n_head),
        device=device,
        dtype=dtypes.get(config.precision, torch.float32),
        requires_grad=True,
    )
    mask = torch.empty((1, 1, T, T), device=device, dtype=torch.bool) if is_masked else None
    k = q
    if model.n_kv_head and not is_masked and shares_heads(q):
        k = q[:, : model.n_kv_head]
    kernel = attention_kernel(q, model.dropout, mask, k)
    return kernel.name.removesuffix("_ATTENTION").lower()


def warn_of_slow_attention(config: Config) -> None:
    """Warn if a GPU does not have its fastest kernel for attention, and say how to get it."""
    if config.trainer.get("accelerator", "cpu") != "cuda":
        return
    kernel = attention(config)
    if kernel == "math":
        # Before compute capability 8.0 (a T4, a V100), neither attention nor Inductor has bfloat16.
        half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "16"
        logger.warning(
            "attention is slow here, without a fused kernel: set precision=%s-mixed, or make "
            "model.n_embd / model.n_head divisible by 8 and at most 256",
            half,
        )
    elif kernel == "flash" and lacks_cudnn_attention():
        logger.warning(
            "attention uses FlashAttention with cuDNN %s, which costs about a tenth of the speed "
            "on this GPU: install a torch wheel with cuDNN above 9.15.0, and unset "
            "LD_LIBRARY_PATH, which may name an older one",
            cudnn_version() or "missing",
        )


def lacks_cudnn_attention() -> bool:
    """Return whether torch would take cuDNN's attention on this GPU if its cuDNN was newer.

    A user can turn it off, and so do deterministic kernels, as with `batch.exact_micro_size`.
    """
    cuda: Any = torch.backends.cuda
    is_wanted = cuda.cudnn_sdp_enabled() and not (
        torch.are_deterministic_algorithms_enabled()
        or os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    )
    return is_wanted and torch.cuda.get_device_capability() in PREFERS_CUDNN


def warn_of_sudden_rate(schedule: Schedule) -> None:
    """Warn if the first update already has a rate far above the one that was tuned."""
    if schedule.warmup_steps == 0 and schedule.scale >= HIGH_SCALE:
        logger.warning(
            "the first step has %g times the tuned learning rate, because the batch is larger, and "
            "there is no warmup: set optim.warmup_steps, optim.lr_scaling=none, or a fixed "
            "batch.global_size",
            schedule.scale,
        )
