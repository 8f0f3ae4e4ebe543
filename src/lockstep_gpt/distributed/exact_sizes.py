"""Which numbers of devices add gradients in the same order, and the receipt's line on it."""

import math
from typing import Any

from lockstep_gpt.errors import UserError
from lockstep_gpt.settings import counted


def exact_world_sizes(global_size: int, micro_size: int) -> list[int]:
    """Return the numbers of ranks for which each rank adds a whole subtree of the micro-batches.

    One rank adds the whole tree; if there are more, each has 2**n micro-batches.
    """
    leaves = global_size // micro_size
    odd = leaves // (leaves & -leaves)
    fits = [odd << power for power in range((leaves // odd).bit_length())]
    return fits if odd == 1 else [1, *fits]


def refuse_other_world_sizes(exact: int | None, total: int | None, world_size: int) -> None:
    """Raise a `UserError` for a number of ranks that don't each have a whole subtree.

    Args:
        exact: samples of a micro-batch, the tree's leaf; None: the sums aren't exact.
        total: samples of a step over all ranks; None: as many as the ranks can hold.
        world_size: ranks with samples of their own.
    """
    if exact is None or total is None:
        return
    fits = exact_world_sizes(total, exact)
    if world_size in fits:
        return
    micro_batches_per_rank = 1 << max(0, round(math.log2(total / exact / world_size)))
    remedy = f"batch.global_size={exact * world_size * micro_batches_per_rank}"
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    possible = [size for size in divisors if world_size in exact_world_sizes(total, size)]
    if possible:
        nearest = min(possible, key=lambda size: abs(size - exact))
        remedy = f"batch.exact_micro_size={nearest}"
    raise UserError(
        f"batch.exact_micro_size={exact} of batch.global_size={total} gives equal bits on "
        f"{either(fits)} devices, not on {world_size}; use one of these, or set {remedy}"
    )


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


def either(choices: list[Any]) -> str:
    """Return the choices as text: `1, 2, or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)}{',' * (len(others) > 1)} or {last}" if others else last
