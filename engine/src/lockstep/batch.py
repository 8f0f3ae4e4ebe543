"""The arithmetic of a batch: how the devices share the samples of an optimizer step."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

from lockstep.errors import UserError
from lockstep.settings import as_typed, check, check_whole, counted, not_a_config

MOST_THREADS = 4096


@runtime_checkable
class Ranks(Protocol):
    """All ranks, as `lockstep.Ranks` counts them."""

    @property
    def local_world_size(self) -> int:
        """Ranks of a node."""

    @property
    def num_nodes(self) -> int:
        """Machines."""


@dataclass(frozen=True)
class _Shares:
    """What each device does of an optimizer step."""

    devices: int  # per node
    nodes: int
    tensor_parallel: int  # ranks that split a model, and have the same samples
    micro_size: int  # samples per device and micro-step
    accumulation: int  # micro-steps per optimizer step


@not_a_config
@dataclass(frozen=True, init=False, repr=False)
class Batch:
    """The samples of an optimizer step, and how devices share them.

    A `global_size` makes the experiment independent of the devices: with more of them, each has
    fewer micro-batches, or, without a `micro_size`, smaller ones.

        >>> batch = Batch(global_size=48, micro_size=4)
        >>> one, four = batch.spread_over(devices=1), batch.spread_over(devices=4)
        >>> one.accumulation, four.accumulation
        (12, 3)
        >>> one.global_size == four.global_size == 48
        True

    Without a `global_size`, a step is one micro-batch of each device:

        >>> Batch(micro_size=4).spread_over(devices=4, nodes=2).global_size
        32

    What depends on the devices, such as `accumulation`, is known after `spread_over`.

    Args:
        global_size: samples of a step over all devices.
        micro_size: samples per device and micro-batch, for equal random numbers, such as dropout's,
            on any number of devices. None: a device's part of `global_size`.
        reference_size: the global size for which a learning rate was tuned; see `scaled_lr`.
        exact_micro_size: samples per micro-batch, for equal bits on any number of devices. None:
            equal up to rounding.
        exact_threads: CPU threads per rank with `exact_micro_size`.

    Raises:
        UserError: a size is out of range, or sizes don't fit together.
    """

    reference_size: int
    exact_micro_size: int | None
    exact_threads: int
    _global_size: int | None
    _micro_size: int | None
    _shares: _Shares | None

    def __init__(
        self,
        global_size: int | None = None,
        micro_size: int | None = None,
        *,
        reference_size: int = 12,
        exact_micro_size: int | None = None,
        exact_threads: int = 1,
    ) -> None:
        check_whole("batch.reference_size", reference_size, at_least=1)
        check_whole("batch.exact_threads", exact_threads, at_least=1, at_most=MOST_THREADS)
        sizes = {
            "global_size": global_size,
            "micro_size": micro_size,
            "exact_micro_size": exact_micro_size,
        }
        for name, size in sizes.items():
            if size is not None:
                check_whole(f"batch.{name}", size, at_least=1)
        if exact_micro_size is not None:
            _check_exact(exact_micro_size, global_size, micro_size)
            micro_size = exact_micro_size
        if micro_size is None and global_size is None:
            _refuse("micro_size", None, "and batch.global_size=null leave it open; set one of them")
        self._set(
            reference_size=reference_size,
            exact_micro_size=exact_micro_size,
            exact_threads=exact_threads,
            _global_size=global_size,
            _micro_size=micro_size,
            _shares=None,
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Return the arguments, and the devices if it is spread over some."""
        line = f"global_size={self._global_size}, micro_size={self._micro_size}"
        line += f", reference_size={self.reference_size}"
        if self.is_exact:
            line += f", exact_micro_size={self.exact_micro_size}"
            line += f", exact_threads={self.exact_threads}"
        if self._shares is None:
            return f"Batch({line})"
        return f"Batch({line}) over {self.ranks}"

    def spread_over(
        self, devices: "int | Ranks", nodes: int = 1, tensor_parallel: int = 1
    ) -> "Batch":
        """Return this batch as `nodes` of `devices` ranks each share it.

        Accumulation reaches a fixed `global_size`, so more devices mean fewer micro-steps, or,
        without a `micro_size`, smaller ones. Without a `global_size`, there is one micro-step, and
        the global batch grows with the devices.

        Args:
            devices: ranks of a node; or all ranks, such as `Run.ranks`, with their nodes.
            nodes: machines.
            tensor_parallel: ranks that split a model, and have the same samples.

        Raises:
            UserError: no whole number fits; the line says which sizes do.
        """
        if isinstance(devices, Ranks):
            nodes = devices.num_nodes
            devices = devices.local_world_size
        check_whole("trainer.devices", devices, at_least=1)
        check_whole("trainer.num_nodes", nodes, at_least=1)
        check_whole("strategy.tensor_parallel", tensor_parallel, at_least=1)
        data_parallel = _data_parallel(devices, nodes, tensor_parallel)
        micro_size = self._micro_size or max(1, (self._global_size or 0) // data_parallel)
        micro_step = micro_size * data_parallel
        accumulation, rest = divmod(self._global_size or micro_step, micro_step)
        if self.exact_micro_size is not None and self._global_size is not None:
            _refuse_other_world_sizes(self.exact_micro_size, self._global_size, data_parallel)
        if rest or not accumulation:
            ranks = _ranks(devices, nodes, tensor_parallel)
            raise UserError(self._indivisible_line(data_parallel, ranks))
        spread = Batch(
            self._global_size,
            self._micro_size,
            reference_size=self.reference_size,
            exact_micro_size=self.exact_micro_size,
            exact_threads=self.exact_threads,
        )
        shares = _Shares(devices, nodes, tensor_parallel, micro_size, accumulation)
        spread._set(_shares=shares)
        return spread

    def _indivisible_line(self, data_parallel: int, ranks: str) -> str:
        total = self._global_size
        assert total is not None
        micro_step = (self._micro_size or 1) * data_parallel
        below = total // micro_step * micro_step
        nearest = [size for size in (below, below + micro_step) if size > 0]
        micro = f"batch.micro_size={self._micro_size} x " if self._micro_size else ""
        line = (
            f"batch.global_size={total} is not divisible by {micro}{ranks} = {micro_step}; "
            f"nearest: batch.global_size={' or '.join(map(str, nearest))}"
        )
        per_rank, rest = divmod(total, data_parallel)
        if rest or self._micro_size is None or per_rank == 0:
            return line
        fits = next(size for size in range(self._micro_size, 0, -1) if per_rank % size == 0)
        return f"{line}, or keep it with batch.micro_size={fits}"

    @property
    def is_exact(self) -> bool:
        """Whether gradients are added in one order, for equal bits on any number of devices."""
        return self.exact_micro_size is not None

    @property
    def is_spread(self) -> bool:
        """Whether it is known which devices share it."""
        return self._shares is not None

    @property
    def grows(self) -> bool:
        """Whether the samples of a step grow with the devices: no `global_size` was given."""
        return self._global_size is None

    @property
    def fixes_micro_batches(self) -> bool:
        """Whether a step has the same micro-batches on any number of devices.

        Random numbers belong to a micro-batch (`MicroBatchSeeds`), so they are then equal, too.
        """
        return self._global_size is not None and self._micro_size is not None

    @property
    def global_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        if self._global_size is not None:
            return self._global_size
        return self.micro_size * self.data_parallel

    @property
    def micro_size(self) -> int:
        """Samples per device and micro-step."""
        if self._shares is None and self._micro_size is not None:
            return self._micro_size
        return self._spread("micro_size").micro_size

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step."""
        return self._spread("accumulation").accumulation

    @property
    def devices(self) -> int:
        """Ranks of a node."""
        return self._spread("devices").devices

    @property
    def nodes(self) -> int:
        """Machines."""
        return self._spread("nodes").nodes

    @property
    def tensor_parallel(self) -> int:
        """Ranks that split a model, and have the same samples."""
        return self._spread("tensor_parallel").tensor_parallel

    @property
    def world_size(self) -> int:
        """Total ranks."""
        return self.devices * self.nodes

    @property
    def data_parallel(self) -> int:
        """Ranks, or groups of ranks, that have samples of their own."""
        return self.world_size // self.tensor_parallel

    @property
    def ranks(self) -> str:
        """How many ranks have samples of their own, as factors: `2 devices x 1 node`."""
        return _ranks(self.devices, self.nodes, self.tensor_parallel)

    def _spread(self, name: str) -> _Shares:
        if self._shares is None:
            raise RuntimeError(
                f"Batch.{name} depends on the devices; call batch.spread_over(devices) first"
            )
        return self._shares

    def receipt_lines(self) -> dict[str, str]:
        """Return what a run says of its batch, and of what is equal on other devices."""
        line = f"{self.ranks} x {counted(self.micro_size, 'sample')} x {self.accumulation} "
        line += f"accumulation = {counted(self.global_size, 'sample')} per step"
        if self.global_size != self.reference_size:
            ratio = self.global_size / self.reference_size
            line += f", {ratio:g} x batch.reference_size={self.reference_size}"
        return {"batch": line, "sums": self._sums_line()}

    def _sums_line(self) -> str:
        """Return how many devices give equal sums of gradients, and what that costs."""
        if self.is_exact:
            leaves = self.global_size // self.micro_size
            sizes = either(exact_world_sizes(self.global_size, self.micro_size))
            copies = gradient_copies(self.accumulation, is_exact=True)
            return (
                f"equal bits on {sizes} devices of one kind: "
                f"{counted(leaves, 'micro-batch', 'es')} in one order, "
                f"{counted(self.exact_threads, 'thread')} each; plus memory for "
                f"{counted(copies, 'more gradient')} of all weights"
            )
        if self.grows:
            return "added in rank order; on another number of devices, the batch is another one"
        line = "added in rank order: equal up to rounding on any number of devices"
        if not self.fixes_micro_batches:
            line += ", but for random numbers, such as dropout"
        size = self.size_to_fix
        if size is None:
            return line
        sizes = either(exact_world_sizes(self.global_size, size))
        leaves = self.global_size // size
        return (
            f"{line}; set batch.exact_micro_size={size} for equal bits on {sizes}, with "
            f"{counted(leaves, 'micro-batch', 'es')} per step"
        )

    @property
    def size_to_fix(self) -> int | None:
        """A size of micro-batches that several numbers of devices can have; None: none is near."""
        several = self.global_size > self.micro_size
        size = self.micro_size if several else max(1, self.global_size // 4)
        return None if self.grows or self.global_size % size else size


def gradient_copies(accumulation: int, *, is_exact: bool) -> int:
    """Return how many gradient sums a rank keeps to add `accumulation` micro-batches pairwise."""
    return accumulation.bit_length() - 1 if is_exact else 0


def exact_world_sizes(global_size: int, micro_size: int) -> list[int]:
    """Return the numbers of ranks for which each rank adds a whole subtree of the micro-batches.

    One rank adds the whole tree; if there are more, each has 2**n micro-batches.
    """
    leaves = global_size // micro_size
    odd = leaves // (leaves & -leaves)
    fits = [odd << power for power in range((leaves // odd).bit_length())]
    return fits if odd == 1 else [1, *fits]


def either(choices: list[Any]) -> str:
    """Return the choices as text: `1, 2, or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)}{',' * (len(others) > 1)} or {last}" if others else last


def _refuse(name: str, value: int | None, rule: str) -> NoReturn:
    raise UserError(f"batch.{name}={as_typed(value)} {rule}")


def _check_exact(exact: int, total: int | None, micro_size: int | None) -> None:
    """Check that all micro-batches can have the exact size, and that it divides the global size."""
    if total is None:
        _refuse("exact_micro_size", exact, "needs a batch.global_size, which is null; set it")
    if total % exact:
        fits = next(size for size in range(min(exact, total), 0, -1) if total % size == 0)
        remedies = [f"batch.global_size={exact * round(total / exact)}"] if exact < total else []
        if fits > 1 or not remedies:  # 1 would be slow
            remedies.append(f"batch.exact_micro_size={fits}")
        rule = f"must divide batch.global_size={total}; set {' or '.join(remedies)}"
        _refuse("exact_micro_size", exact, rule)
    rule = f"and batch.micro_size={micro_size} are two sizes; set one to null"
    check("batch.exact_micro_size", exact, micro_size in (None, exact), rule)


def _refuse_other_world_sizes(exact: int, total: int, world_size: int) -> None:
    """Raise a `UserError` for a number of ranks that don't each have a whole subtree.

    Args:
        exact: samples of a micro-batch, the tree's leaf.
        total: samples of a step over all ranks.
        world_size: ranks with samples of their own.
    """
    fits = exact_world_sizes(total, exact)
    if world_size in fits:
        return
    micro_batches_per_rank = 1 << max(0, round(math.log2(total / exact / world_size)))
    remedy = f"batch.global_size={exact * world_size * micro_batches_per_rank}"
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    possible = [size for size in divisors if world_size in exact_world_sizes(total, size)]
    if possible:
        nearest = min(possible, key=lambda size: abs(size - exact))
        remedy = f"batch.exact_micro_size={nearest}"
    raise UserError(
        f"batch.exact_micro_size={exact} of batch.global_size={total} gives equal bits on "
        f"{either(fits)} devices, not on {world_size}; use one of these, or set {remedy}"
    )


def _data_parallel(devices: int, nodes: int, tensor_parallel: int) -> int:
    """Return how many groups of `tensor_parallel` ranks there are; a `UserError` if some lack."""
    groups, rest = divmod(devices * nodes, tensor_parallel)
    if rest or not groups:
        raise UserError(
            f"strategy.tensor_parallel={tensor_parallel} does not divide "
            f"{_ranks(devices, nodes)}; use trainer.devices={tensor_parallel} or a multiple, "
            "or lower it"
        )
    return groups


def _ranks(devices: int, nodes: int, tensor_parallel: int = 1) -> str:
    text = f"{counted(devices, 'device')} x {counted(nodes, 'node')}"
    if tensor_parallel > 1:
        text += f" / {tensor_parallel} tensor-parallel"
    return text
