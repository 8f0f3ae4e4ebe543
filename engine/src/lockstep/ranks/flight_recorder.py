"""torch's flight recorder: the last collectives of each rank, to explain a run that hangs."""

import importlib
import os
from pathlib import Path

TRACE = "nccl_trace_rank_"  # prefix of the files; the rank follows
RECORDED = 2000  # collectives that it keeps


def record_collectives(backend: str, folder: Path) -> None:
    """Turn the recorder on before ranks join, if they use NCCL; what the user has set stays.

    Args:
        backend: of the process group.
        folder: where NCCL's watchdog writes the traces after a timeout.
    """
    if backend != "nccl":
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str((folder / TRACE).resolve()))


def write_trace(backend: str, folder: Path, rank: int) -> Path | None:
    """Write the trace of this rank in `folder`; return the file, or None if the recorder is off.

    The watchdog would write the same file, but the process ends before that.
    """
    kind = "_dump_nccl_trace" if backend == "nccl" else "_dump_fr_trace"
    dump = getattr(importlib.import_module("torch._C._distributed_c10d"), kind, None)
    if dump is None or not os.environ.get("TORCH_FR_BUFFER_SIZE"):
        return None
    path = folder / f"{TRACE}{rank}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(dump())
    return path
