"""Measure parts of a step in one process, so that only the first waits for imports.

usage: python -m parts --seconds N NAME=SECONDS ...

Each part has its own limit, and all together have one of N seconds. What fails, or takes too long,
ends only its part. Rows are printed as soon as they are known.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator

BEGUN = time.monotonic()
# As the project's own processes have it; torch reads it when it is imported.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from clock import DEVICE, free_memory, show  # noqa: E402

from parts import (  # noqa: E402
    attention,
    collectives,
    ddp,
    facts,
    loss,
    micro_batch,
    optimizers,
    products,
)

PARTS: dict[str, Callable[[], None]] = {
    "facts": facts.main,
    "collectives": collectives.main,
    "products": products.main,
    "attention": attention.main,
    "base": micro_batch.base,
    "float32 residual": micro_batch.float32_residual,
    "loss": loss.main,
    "ddp": ddp.main,
    "coordinate descent": micro_batch.coordinate_descent,
    "optimizers": optimizers.main,
    "large optimizers": optimizers.large,
}
SHORTEST = 2.0  # seconds: with less time left, nothing starts
AGAIN = 5.0  # seconds from one interruption to the next, if the first got lost


class CutOff(BaseException):
    """A part's time is over; libraries that catch every `Exception` let this through."""


def main() -> None:
    """Do the parts that the command line names, in its order."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("parts", nargs="+")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    load_the_compiler()
    for word in options.parts:
        name, _, seconds = word.partition("=")
        left = options.seconds - (time.monotonic() - BEGUN)
        if left < SHORTEST:
            show(name, "before it began: the stage's time is over", "cut off")
            continue
        do(name, PARTS[name], min(float(seconds), left))
    if dist.is_initialized():
        dist.destroy_process_group()


def load_the_compiler() -> None:
    """Compile something: a limit that interrupted the compiler's imports would leave it broken."""
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    torch.compile(lambda x: x.sin().sum())(x).backward()


def do(name: str, part: Callable[[], None], seconds: float) -> None:
    """Do one part; whatever happens becomes a row."""
    try:
        with limited(seconds):
            part()
    except CutOff:
        show(name, f"after {seconds:.0f} s", "cut off")
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip() or "no message").splitlines()[0][:200]
        show(name, f"{type(error).__name__}: {reason}", "FAILED")
    torch.compiler.reset()
    free_memory()


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `CutOff` in the block when its time is over."""

    def interrupt(*_: object) -> None:
        raise CutOff

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    main()
