"""`strategy.save_parts`: each rank writes its shards to a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.strategies.sharded_states import (
    copied_to_host,
    shares_in,
    without_shares,
)


def write_part(
    checkpoint: dict[str, Any], path: Path, writer: Any, device: torch.device
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write this rank's part of a checkpoint; every rank must call this.

    Args:
        checkpoint: has shards.
        path: of the checkpoint, which names the parts.
        writer: the `CheckpointIO`, which has `save_part`.
        device: of tensors that ranks exchange.

    Returns:
        the checkpoint without the shards, and the name -> SHA-256 of all parts.

    Raises:
        RunError: on the ranks whose file cannot be written; the other ranks lose these peers.
    """
    world_size = dist.get_world_size()
    names = [part_path(path, rank, world_size) for rank in range(world_size)]
    part = copied_to_host(shares_in(checkpoint))
    hexadecimal = writer.save_part(part, names[dist.get_rank()])
    local_digest = torch.tensor([*bytes.fromhex(hexadecimal)], dtype=torch.uint8, device=device)
    digests = [torch.empty_like(local_digest) for _ in names]
    dist.all_gather(digests, local_digest)
    sums = {
        part.name: bytes(digest.tolist()).hex() for part, digest in zip(names, digests, strict=True)
    }
    return {**without_shares(checkpoint), "parts": [*sums]}, sums


def part_path(path: Path, rank: int, world_size: int) -> Path:
    """Return the path to which `rank` writes its part of the checkpoint `path`."""
    return path.with_name(f"{path.stem}.{rank:05d}-of-{world_size:05d}.part")
