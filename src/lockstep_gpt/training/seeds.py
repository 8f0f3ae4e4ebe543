"""The random numbers of a step: a function of the run's seed, the step and the rank."""

import hashlib

import torch


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the host's generator and that of `device`, if it has its own.

    `torch.manual_seed` takes a millisecond where kinds of devices are missing: for each it notes
    the call, with the whole stack as text.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return 63 bits that depend on all three."""
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
