"""Times the parts of a transformer's layer on a CPU with each kernel that could compute them.

The parts are timed in turns, and the shortest time of each counts: other programs only add to it.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from lockstep_gpt.model import cpu_kernels
from lockstep_gpt.model.cpu_kernels import CpuKernels, name_of_products
from lockstep_gpt.model.functional import causal_attention
from lockstep_gpt.training.orthogonalization import orthogonalized

SECONDS = 0.12  # for layers, besides a first round, which has no limit and does not count
SECONDS_OF_OTHERS = 0.04  # for Newton-Schulz, and for threads
GAIN = 1.02  # other kernels than the rule's must be so many times faster
GAIN_OF_PRECISION = 1.1  # and another precision: it rounds differently, so no noise may decide
GAIN_OF_THREADS = 1.5  # for fewer threads: other programs disturb many threads more
# The size of what is timed, some milliseconds on one thread.
OPERATIONS = 1 << 28
MOST_WEIGHTS = 1 << 17
FEWEST_ROWS = 128
OTHER_NUMBERS = 1 << 21  # 8 MiB, more than most caches of a core
LONGEST_PLAIN = 1024  # tokens; beyond, scores of all pairs of tokens need much memory, too
LARGEST_EDGE = 256  # of matrices for Newton-Schulz
MOST_OPERATIONS = 1 << 34  # of a layer's step; with more, all threads are of use

K = TypeVar("K", bound=Hashable)
Work = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """The shape of a model's layers."""

    width: int  # C
    heads: int
    length: int  # T


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer."""

    products: str  # blas or onednn
    attention: str  # plain or fused
    precision: str  # 32-true or bf16-mixed

    def __str__(self) -> str:
        """Return it as a receipt shows it."""
        library = name_of_products(self.products)
        return f"{library}/{self.attention}/{self.precision}"

    @property
    def linear(self) -> tuple[str, str]:
        """What decides the time of linear layers; bfloat16 products are always oneDNN's."""
        products = "onednn" if self.precision == "bf16-mixed" else self.products
        return products, self.precision


def layer_seconds(shape: Shape, candidates: Iterable[Candidate]) -> dict[Candidate, float]:
    """Return the seconds per token of forward and backward of a layer, on one thread."""
    candidates = [*candidates]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cpu_kernels.restored_afterward():
            linear = {each.linear: LinearLayers(shape, each) for each in candidates}
            attention = {each: Attention(shape, each) for each in candidates}
            parts: dict[Any, Work] = {**linear, **attention}
            seconds = shortest(parts, SECONDS)
    finally:
        torch.set_num_threads(threads)
    return {
        each: linear[each.linear].per_token(seconds[each.linear])
        + attention[each].per_token(seconds[each])
        for each in candidates
    }


def fastest(seconds: Mapping[Candidate, float], rule: Candidate) -> Candidate:
    """Return the fastest candidate of all, or of the rule's precision if that is nearly as fast."""
    alike = [each for each in seconds if each.precision == rule.precision]
    chosen = min(alike, key=lambda each: seconds[each])
    if seconds[chosen] * GAIN > seconds[rule]:
        chosen = rule
    best = min(seconds, key=lambda each: seconds[each])
    return best if seconds[best] * GAIN_OF_PRECISION < seconds[chosen] else chosen


def newton_schulz_seconds(shape: Shape, forms: Iterable[str]) -> dict[str, float]:
    """Return the seconds of Newton-Schulz, in each form, for matrices of a layer, on one thread."""
    edge = min(shape.width, LARGEST_EDGE)
    source = torch.Generator().manual_seed(0)
    count = max(1, LARGEST_EDGE // edge)
    sizes = ((2 * count, edge, edge), (count, edge, 4 * edge))  # a layer has 4 and 2 of them
    stacks = [torch.randn(size, generator=source) for size in sizes]

    def work(form: str) -> Work:
        dtype = torch.bfloat16 if form == "bfloat16" else torch.float32

        def orthogonalize() -> None:
            cpu_kernels.use(replace(cpu_kernels.in_use, newton_schulz=form))
            for matrices in stacks:
                orthogonalized(matrices, dtype)

        return orthogonalize

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with cpu_kernels.restored_afterward():
            return shortest({form: work(form) for form in forms}, SECONDS_OF_OTHERS)
    finally:
        torch.set_num_threads(threads)


def thread_seconds(shape: Shape, samples: int, candidate: Candidate, most: int) -> dict[int, float]:
    """Return the seconds of a layer for a micro-batch with `most` threads, half, and so on.

    Returns:
        threads -> seconds; only `most`, with 0.0, if a layer is so large that all are of use.
    """
    rows = samples * shape.length
    if most == 1 or 72 * shape.width**2 * rows > MOST_OPERATIONS:
        return {most: 0.0}
    parts: list[Work] = [
        LinearLayers(shape, candidate, rows),
        Attention(shape, candidate, samples),
    ]
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    seconds = {}
    with cpu_kernels.restored_afterward():
        for count in counts:  # not in turns: the first call after a change starts threads
            torch.set_num_threads(count)
            took = shortest(dict(enumerate(parts)), SECONDS_OF_OTHERS / len(counts))
            seconds[count] = sum(took.values())
    return seconds


def fewest_threads(seconds: Mapping[int, float]) -> int:
    """Return how many threads to use: fewer than all only if that is clearly faster."""
    most = max(seconds)
    chosen = most
    for count in sorted(seconds, reverse=True):
        if seconds[count] * GAIN_OF_THREADS < seconds[chosen]:
            chosen = count
    return chosen


def shortest(works: Mapping[K, Work], seconds: float) -> dict[K, float]:
    """Run the works in turns for so many seconds, at least once; return the shortest of each."""
    for work in works.values():
        work()  # allocates, and prepares kernels
    times: dict[K, list[float]] = {name: [] for name in works}
    other = torch.zeros(OTHER_NUMBERS)
    end = time.perf_counter() + seconds
    while True:
        for name, work in works.items():
            other.add_(1)  # as in a step, caches have something else
            begun = time.perf_counter()
            work()
            now = time.perf_counter()
            times[name].append(now - begun)
        if now > end:
            return {name: min(each) for name, each in times.items()}


class LinearLayers:
    """Forward and backward of a norm and two linear layers with GELU between them."""

    def __init__(self, shape: Shape, candidate: Candidate, rows: int | None = None) -> None:
        width = shape.width
        inner = 4 * width if rows else min(4 * width, max(64, MOST_WEIGHTS // width))
        self.rows = rows or max(FEWEST_ROWS, min(1024, OPERATIONS // (12 * width * inner)))
        # A layer has 12 C^2 weights.
        self._layers = 12 * width**2 / (2 * width * inner)
        self._products, self._precision = candidate.linear
        source = torch.Generator().manual_seed(0)
        self._x = torch.randn(self.rows, width, generator=source).requires_grad_()
        self._up = (torch.randn(inner, width, generator=source) * width**-0.5).requires_grad_()
        self._down = (torch.randn(width, inner, generator=source) * inner**-0.5).requires_grad_()
        self._slope = torch.randn(self.rows, width, generator=source)

    def __call__(self) -> None:
        """Compute them once."""
        cpu_kernels.use_products(self._products)
        with self._autocast():
            x = F.layer_norm(self._x, self._x.shape[-1:])
            hidden = F.gelu(F.linear(x, self._up), approximate="tanh")
            y = self._x + F.linear(hidden, self._down)
        torch.autograd.grad(y, (self._x, self._up, self._down), self._slope.to(y.dtype))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._precision == "bf16-mixed":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def per_token(self, seconds: float) -> float:
        """Return the seconds of a layer per token."""
        return self._layers * seconds / self.rows


class Attention:
    """Forward and backward of causal attention."""

    def __init__(self, shape: Shape, candidate: Candidate, samples: int | None = None) -> None:
        self._products = candidate.products
        T = shape.length
        D = shape.width // shape.heads
        heads = shape.heads
        if samples is None:
            fits = max(1, OPERATIONS // (2 * 14 * T**2 * D))
            heads = min(heads, fits)
            samples = max(1, min(16, fits // heads))
        self._kernels = CpuKernels(longest_plain=T if candidate.attention == "plain" else 0)
        self._tokens = samples * T * heads / shape.heads  # with all their heads
        dtype = torch.bfloat16 if candidate.precision == "bf16-mixed" else torch.float32
        source = torch.Generator().manual_seed(0)
        # As a model has them: slices of one product.
        self._qkv = torch.randn(samples, T, 3, heads, D, generator=source).to(dtype)
        self._qkv.requires_grad_()
        self._slope = torch.randn(samples, T, heads * D, generator=source).to(dtype)

    def __call__(self) -> None:
        """Compute it once."""
        cpu_kernels.use_products(self._products)
        cpu_kernels.use(self._kernels)
        q, k, v = self._qkv.permute(2, 0, 3, 1, 4).unbind()
        y = causal_attention(q, k, v, dropout=0.0).transpose(1, 2).flatten(2)
        torch.autograd.grad(y, self._qkv, self._slope)

    def per_token(self, seconds: float) -> float:
        """Return the seconds of a layer per token."""
        return seconds / self._tokens
