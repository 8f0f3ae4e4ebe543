"""The random seed of a micro-batch: a function of the run's seed, the step, and its index."""

import hashlib

import torch


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the host's generator and that of `device`, if it has its own.

    `torch.manual_seed` takes a millisecond if device types are missing: for each, it records the
    call with the whole stack as text.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def leaf_seed(seed: int, step: int, leaf: int) -> int:
    """Return 63 bits that depend on all three; `leaf` counts a step's micro-batches over ranks."""
    digest = hashlib.blake2b(f"{seed} {step} {leaf}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
