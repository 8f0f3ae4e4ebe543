"""Clock and power of the GPU while a block runs: under load, a card may lower its clock."""

from __future__ import annotations

import ctypes
import statistics
import threading
from collections.abc import Callable

import torch
from clock import DRY

INTERVAL = 0.02  # seconds
SM_CLOCK = 1  # NVML's number for the clock of the multiprocessors
LIBRARY = "libnvidia-ml.so.1"  # comes with the driver


class Watch:
    """Samples the clock and the power in a thread, from the start of the block to its end."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def __str__(self) -> str:
        """Return medians without the first third, in which the load begins."""
        if not self._samples:
            return "clock unknown"
        clocks, watts = zip(*self._samples[len(self._samples) // 3 :], strict=True)
        return f"{statistics.median(clocks):.0f} MHz, {statistics.median(watts):.0f} W"

    def _look(self) -> None:
        try:
            read = reader()
        except (OSError, AttributeError):  # no driver, or one without these functions
            return
        while read is not None and not self._ended.wait(INTERVAL):
            sample = read()
            if sample is not None:
                self._samples.append(sample)


def reader() -> Callable[[], tuple[int, float] | None] | None:
    """Return what reads MHz and watts of the GPU in use; None if NVML cannot.

    Raises:
        OSError: the driver's library is absent.
    """
    if DRY:
        return None
    nvml = ctypes.CDLL(LIBRARY)
    card = ctypes.c_void_p()
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(card)):
        return None

    def read() -> tuple[int, float] | None:
        megahertz = ctypes.c_uint()
        milliwatts = ctypes.c_uint()
        if nvml.nvmlDeviceGetClockInfo(card, SM_CLOCK, ctypes.byref(megahertz)):
            return None
        if nvml.nvmlDeviceGetPowerUsage(card, ctypes.byref(milliwatts)):
            return None
        return megahertz.value, milliwatts.value / 1e3

    return read
