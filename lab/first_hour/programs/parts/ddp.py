"""The compiled micro-batch in DDP: one graph, or one for each bucket of gradients.

Without a peer, only the graphs differ: parts that the compiler sees apart cannot be fused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.config as dynamo
from clock import DRY, milliseconds, seconds_of, show
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from parts.micro_batch import step_of
from parts.process_group import in_ddp, join
from parts.recipe import C, new_model

BUCKET = 1 if DRY else 25  # MiB; torch takes no less than 1
WIDTH = 256 if DRY else C  # enough for some buckets
FORMS = {"one graph": False, f"buckets of {BUCKET} MiB": True}  # -> torch's optimize_ddp


class Whole(nn.Module):
    """The root that DDP wraps, with the compiled model in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> Any:
        """Return the loss."""
        return self.model(*given)


class Counting:
    """A compiler's backend that counts the graphs which it gets."""

    def __init__(self) -> None:
        self.graphs = 0
        self._compile: Any = lookup_backend("aot_eager" if DRY else "inductor")

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Compile one graph."""
        self.graphs += 1
        return self._compile(graph, inputs)


def main() -> None:
    """Print a row for each form."""
    join()
    for name, split in FORMS.items():
        torch.compiler.reset()
        with dynamo.patch(optimize_ddp=split):
            measure(name)


def measure(name: str) -> None:
    """Print the number of graphs, and the times with and without the all-reduce of a step."""
    model = new_model(WIDTH)
    backend = Counting()
    model.compile(dynamic=False, backend=backend)
    wrapped = in_ddp(Whole(model), BUCKET)
    work = step_of(wrapped)
    with wrapped.no_sync():
        first = seconds_of(work)
        alone = milliseconds(work, repeats=10)
    summed = milliseconds(work, repeats=6, warmup=2)
    show(
        f"ddp: {name}",
        f"graphs: {backend.graphs}; {alone:.2f} ms a micro-batch, {summed:.2f} ms with all-reduce; "
        f"compiled in {first:.0f} s",
    )
