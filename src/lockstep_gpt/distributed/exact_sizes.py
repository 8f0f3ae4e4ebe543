"""What it costs to add gradients in the same order, and the receipt's line on it."""

from typing import Any

from lockstep_gpt.batch import either, exact_world_sizes
from lockstep_gpt.settings import counted


def gradient_copies(accumulation: int, *, is_exact: bool) -> int:
    """Return how many gradient sums a rank keeps to add `accumulation` micro-batches pairwise."""
    if not is_exact:
        return 0
    return accumulation.bit_length() - 1


def has_bucket_copies(strategy: dict[str, Any], accumulation: int) -> bool:
    """Return whether DDP's buckets are a second copy of a rank's gradients.

    Args:
        strategy: the settings of configs/strategy/ddp.yaml.
        accumulation: micro-batches of a rank in one step.
    """
    if not strategy.get("gradient_as_bucket_view", True):
        return True
    return accumulation > 1 and bool(strategy.get("find_unused_parameters", False))


def sums_line(
    global_size: int,
    micro_size: int,
    accumulation: int,
    *,
    is_exact: bool,
    grows: bool = False,
    accelerator: str = "cpu",
) -> str:
    """Return the receipt's line: what is equal on other numbers of devices, and its cost.

    Args:
        global_size: samples of a step over all ranks.
        micro_size: samples of a micro-batch.
        accumulation: micro-batches of a rank in one step.
        is_exact: whether gradients are added in one order on any number of devices.
        grows: whether the samples of a step grow with the devices.
        accelerator: cpu, cuda, or mps.
    """
    import torch

    leaves = global_size // micro_size
    if is_exact:
        sizes = exact_world_sizes(global_size, micro_size)
        if accelerator == "cuda":
            kind = torch.cuda.get_device_name()
        else:
            kind = torch.backends.cpu.get_cpu_capability()
        copies = gradient_copies(accumulation, is_exact=True)
        return (
            f"equal bits on {either(sizes)} devices: {counted(leaves, 'micro-batch', 'es')} in "
            f"one order ({kind}, torch {torch.__version__}, "
            f"{counted(torch.get_num_threads(), 'thread')}), plus memory for {copies} "
            f"more gradient{'s' * (copies != 1)} of all weights"
        )
    line = "added in rank order: equal up to rounding on any number of devices"
    size = micro_size if leaves > 1 else max(1, global_size // 4)
    if not grows and global_size % size == 0:
        sizes = exact_world_sizes(global_size, size)
        leaves = global_size // size
        line += (
            f"; set batch.exact_micro_size={size} for equal bits on {either(sizes)}, with "
            f"{counted(leaves, 'micro-batch', 'es')} per step"
        )
    return line
