"""What rank 0 says of any run before its first step."""

import torch
import torch.distributed as dist
from lightning import Trainer
from torch import nn

from lockstep.batch import Batch
from lockstep.callbacks.clipping import ClipAndSkip
from lockstep.patches.lightning import synchronizes_batchnorm
from lockstep.patches.torch import BatchNorm
from lockstep.ranks.ranks import backend_here
from lockstep.settings import counted
from lockstep.strategies.ddp import DDPStrategy

DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def facts_of(trainer: Trainer, module: nn.Module | None = None) -> dict[str, str]:
    """Return label -> line: what is trained, on which devices, and how they work together.

    Args:
        trainer: is about to train.
        module: what it trains; None: no line is about it.
    """
    threads = counted(torch.get_num_threads(), "thread")
    facts = {
        "devices": f"{trainer.world_size} x {trainer.strategy.root_device.type}, {threads} each",
        "strategy": strategy_line(trainer),
        "precision": str(trainer.precision),
    }
    if module is None:
        return facts
    limits = [each.max_norm for each in trainer.callbacks if isinstance(each, ClipAndSkip)]  # type: ignore[attr-defined]
    if limits:
        norm = limits[0]
        facts["clipping"] = "none" if norm is None else f"gradients to a norm of {norm:g}"
    size = sum(weight.numel() for weight in module.parameters())
    if synchronizes_batchnorm(trainer):
        facts["batchnorm"] = batchnorm_line(module)
    return {"module": f"{type(module).__name__}, {counted(size, 'parameter')}", **facts}


def batchnorm_line(module: nn.Module) -> str:
    """Return what `Trainer(sync_batchnorm=True)` does to a module."""
    count = sum(isinstance(layer, BatchNorm) for layer in module.modules())
    if count == 0:
        return "trainer.sync_batchnorm=true changes nothing: the model has none"
    return f"{counted(count, 'layer')} synchronized over all ranks"


def random_lines(module: nn.Module, batch: Batch) -> dict[str, str]:
    """Return label -> line if layers draw other numbers on another number of devices.

    What a module draws by a function, such as `F.dropout`, can't be seen here.
    """
    count = sum(map(drops, module.modules()))
    if count == 0 or batch.grows or batch.fixes_micro_batches:
        return {}
    size = batch.size_to_fix or 1
    return {
        "random": f"{counted(count, 'layer')} with dropout, whose numbers belong to a micro-batch, "
        "and its size to the number of devices: results depend on it; set "
        f"batch.micro_size={size} for losses that are equal up to rounding"
    }


def drops(layer: nn.Module) -> bool:
    """Return whether a layer draws what it drops in training."""
    if isinstance(layer, DROPOUTS):
        return layer.training and layer.p > 0
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.training and layer.dropout > 0
    return False


def strategy_line(trainer: Trainer) -> str:
    """Return which strategy it is, over what it exchanges, and the memory that it needs."""
    strategy = trainer.strategy
    line = type(strategy).__name__
    if trainer.world_size > 1 and dist.is_initialized():
        line += f" over {backend_here()}"
    accumulation = trainer.accumulate_grad_batches
    if isinstance(strategy, DDPStrategy) and strategy.copies_gradients(accumulation):
        line += ", plus memory for its buckets: 1 more gradient of all weights"
    parts = getattr(strategy, "tensor_parallel", 1)
    if parts > 1:
        line += f", {trainer.world_size // parts} data x {parts} tensor parallel"
    return line
