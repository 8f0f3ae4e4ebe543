"""Refuses models and batches that can't fit into this machine's memory, before ranks start."""

import contextlib
import os
from pathlib import Path

from lockstep_gpt.batch import Batch
from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.settings import counted

GIB = 1 << 30
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes, or `max`; only on Linux
MEMORY = Path("/proc/meminfo")  # only on Linux


def refuse_too_large(config: Config, placement: Placement, batch: Batch) -> None:
    """Raise a `UserError` if weights or a micro-batch alone need more memory than there is.

    Each rank makes its model in the host's memory, also for a GPU and under fsdp2. Only what is
    certain counts: training needs several times more. Of a module of the user's, nothing is.
    """
    if not config.trains_gpt:
        return
    memory = memory_here()
    ranks = counted(placement.devices, "rank")
    present = f"but this machine has {_gib(memory)}"
    weights = fewest_weights(config)
    size = 4 * weights  # bytes in float32
    if placement.devices * size > memory:
        raise UserError(
            f"model.n_embd={config.model.n_embd} and model.n_layer={config.model.n_layer} make at "
            f"least {weights:,} weights, {_gib(size)} for each of {ranks}, {present}; lower "
            "model.n_embd, model.n_layer, or trainer.devices"
        )
    block_size = config.model.block_size
    tokens = batch.micro_size * block_size
    size = 8 * tokens  # bytes of the ids
    if placement.accelerator == "cpu":
        size += 2 * tokens * config.model.n_embd  # of the embeddings, at most halved by autocast
    if placement.devices * size > memory:
        raise UserError(
            f"batch.micro_size={batch.micro_size} and model.block_size={block_size} make "
            f"{tokens:,} tokens per micro-batch, at least {_gib(size)} for each of {ranks}, "
            f"{present}; lower batch.micro_size (if null: batch.global_size)"
        )


def fewest_weights(config: Config) -> int:
    """Return the weights that the model has without those that depend on the data; 0 if unknown.

    Attention has at least 2 C^2 per block, the MLP 8 C^2. An architecture of your own may differ.
    """
    if config.model.architecture not in ("gpt", "modern"):
        return 0
    width = config.model.n_embd
    return 10 * config.model.n_layer * width**2


def memory_here() -> int:
    """Return the bytes that processes of this machine, or of this container, can use."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        memory = min(memory, int(CONTAINER_LIMIT.read_text()))
    with contextlib.suppress(OSError, StopIteration):
        swap = next(line for line in MEMORY.read_text().splitlines() if line.startswith("SwapTot"))
        memory += 1024 * int(swap.split()[1])
    return memory


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"
