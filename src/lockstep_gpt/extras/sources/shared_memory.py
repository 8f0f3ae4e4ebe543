"""Check, before torch is imported, that loader processes can hand over batches."""

from __future__ import annotations

import os
import sys
import tempfile

from lockstep_gpt.config import Config, UserError

SHARED_MEMORY = "/dev/shm"
BATCHES, TOKEN = 2, 2  # batches that a process prefetches; the fewest bytes of a token
LOCKS = 64 << 10  # bytes per loader process, approximately: a page for each lock of its queues


def refuse_missing(config: Config) -> None:
    """Raise a `UserError` if /dev/shm is too small for what the loader processes share."""
    workers = getattr(config.data, "num_workers", 0)  # a configuration made in code may lack data
    if not workers or sys.platform != "linux":
        return
    devices = config.trainer.get("devices", "auto")
    ranks = devices if isinstance(devices, int) else 1
    windows = ranks * (config.batch.micro_size or 0) or config.batch.global_size or 1
    batch = windows * (config.model.block_size + 1) * TOKEN  # of all ranks together
    needed = workers * (ranks * LOCKS + BATCHES * batch)
    try:
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, needed)
    except OSError as error:
        raise UserError(
            f"data.num_workers={workers} needs {needed:,} bytes of {SHARED_MEMORY} "
            f"({error.strerror}); set data.num_workers=0, or start the container with --shm-size=8g"
        ) from None
