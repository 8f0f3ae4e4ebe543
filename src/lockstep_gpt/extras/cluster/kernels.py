"""Record the operations of a training step, and turn them into the kernels of a GPU.

Each operation is recorded with the bytes that it reads and writes. Two rules turn operations into
kernels. In eager code, each one is a kernel. In compiled code, consecutive operations that are not
matrix products, attention, gathers, or scatters form one kernel. It reads its outside inputs once,
and writes what others read. It does not write a tensor that only such kernels read, if the tensor's
inputs are no larger: those kernels recompute it, as torch's partitioner makes them. No kernel spans
forward and backward.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep_gpt.distributed.peaks import in_form
from lockstep_gpt.extras.cluster.hardware import Hardware
from lockstep_gpt.extras.cluster.tracing import changed
from lockstep_gpt.model import functional
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.torch_patches import declared_arguments

EMBEDDING, BLOCKS, LOSS, SUMS, MUON, UPDATE = PARTS = (
    "embedding",
    "blocks",
    "loss",
    "accumulation",  # of gradients, in each micro-batch but the first
    "muon",  # its momentum and its products, once per step, which ranks share under DDP
    "optimizer",  # the rest of it, and clipping, once per step
)
UPDATES = (MUON, UPDATE)
MODEL = (EMBEDDING, BLOCKS, LOSS)  # in each micro-batch
MEMORY, PRODUCT, ATTENTION = "memory", "product", "attention"
FORMS = {torch.float64: "fp64", torch.float32: "tf32", torch.float16: "fp16"}  # others: bf16
# Names of aten operations.
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm"}
MOVES = {"embedding", "embedding_dense_backward", "index", "index_put", "index_put_", "scatter_"}
PICK = {"embedding", "gather", "scatter_", "nll_loss_forward"}  # touch only what the indices select
OVERWRITE = {"zero_", "fill_", "copy_"}  # these do not read what they overwrite
TO_HOST = {"_to_copy", "copy_"}
BACKWARD_OF_ATTENTION = 2.5  # five products instead of forward's two (Dao et al. 2022)


@dataclass(frozen=True)
class Kernel:
    """The work of one kernel on a device."""

    part: str
    kind: str
    read: float  # bytes
    written: float
    flops: float = 0.0
    form: str = ""  # number format of its products

    def seconds(self, hardware: Hardware) -> float:
        """Return how long the kernel takes on `hardware`."""
        bandwidth = hardware.memory_bandwidth * hardware.memory_share
        moving = (self.read + self.written) / bandwidth
        if not self.flops:
            return moving
        share = hardware.product_share
        if self.kind == ATTENTION:
            share = hardware.attention_share
        peak = in_form(hardware.peak, self.form) or min(hardware.peak.values())
        return max(moving, self.flops / (peak * share))


@dataclass
class _Operation:
    """One call of an aten operation."""

    name: str
    part: str
    compiled: bool
    backward: bool
    read: dict[int, float]  # storage -> bytes
    written: dict[int, float]
    changed: set[int]  # storages that existed before it
    flops: float = 0.0
    form: str = ""

    @property
    def kind(self) -> str:
        if self.name in PRODUCTS:
            return PRODUCT
        if "attention" in self.name:
            return ATTENTION
        return MEMORY

    @property
    def fuses(self) -> bool:
        return self.compiled and self.kind == MEMORY and self.name not in MOVES

    def count_products(self, args: Any) -> None:
        """Set the FLOP of matrix products and attention, and their number format."""
        if self.kind == PRODUCT:
            left, right = args[:2] if self.name in ("mm", "bmm") else args[1:3]
            self.flops = 2.0 * left.numel() * right.shape[-1]
            self.form = FORMS.get(left.dtype, "bf16")
        elif self.kind == ATTENTION:
            backward = "backward" in self.name
            query, key = args[1:3] if backward else args[:2]
            # Two products; the causal mask halves the work.
            self.flops = 2.0 * query.numel() * key.shape[-2]
            if backward:
                self.flops *= BACKWARD_OF_ATTENTION
            self.form = FORMS.get(query.dtype, "bf16")

    def alone(self) -> Kernel:
        read = sum(self.read.values())
        written = sum(self.written.values())
        return Kernel(self.part, self.kind, read, written, self.flops, self.form)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation inside it, and counts where the host would wait for the device.

    Args:
        compiled: whether torch.compile compiles the model.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sums: set[int] = set()  # storages of gradients that later ones are added to
        self.host: set[int] = set()  # storages that are not on the device
        self.waits = 0
        self._compiled = compiled
        self._part, self._backward = BLOCKS, False
        self._eager = False
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive so that no key is reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default's guard against compilation costs a second of imports

    def enter(self, part: str, backward: bool = False, eager: bool = False) -> None:
        """Set the part of the step that the next operations belong to.

        They are not compiled if `eager`.
        """
        self._part, self._backward = part, backward
        self._eager = eager

    @contextlib.contextmanager
    def watching(self, model: GPT) -> Iterator[None]:
        """Record where the parts of the model begin, in forward and in backward."""

        def entering(x: Tensor, part: str, before: str) -> None:
            self.enter(part)
            if x.requires_grad:
                x.register_hook(lambda _: self.enter(before, backward=True))  # type: ignore[no-untyped-call]

        def loss_of(features: Tensor, head: Tensor, *others: Any) -> Tensor:
            entering(features, LOSS, BLOCKS)
            loss = usual_loss(features, head, *others)
            loss.register_hook(lambda _: self.enter(LOSS, backward=True))  # type: ignore[no-untyped-call]
            return loss

        usual_loss = functional.linear_cross_entropy
        blocks: Any = getattr(model, "blocks", ())
        hooks = []
        if len(blocks):
            self.enter(EMBEDDING)
            first: nn.Module = blocks[0]
            enter_blocks = partial(entering, part=BLOCKS, before=EMBEDDING)
            hooks.append(first.register_forward_pre_hook(lambda _, values: enter_blocks(values[0])))
        with changed(functional, linear_cross_entropy=loss_of):
            yield
        for hook in hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and record it; values that the host would wait for are zero."""
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name == "_local_scalar_dense":
            self.waits += not self.host.issuperset(self.sizes(args))
            return 0
        if name in TO_HOST:
            target = self._host(name, args, kwargs)
            if target is not None:
                self.waits += 1
                return target
        self.waits += name == "nonzero"
        result = func(*args, **kwargs)
        if func.namespace == "aten" and "empty" not in name:
            self._note(name, args, kwargs, result, _changed(func, args, kwargs))
        return result

    @staticmethod
    def _host(name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return zeros as the result of a copy from device to host; None for any other call."""
        source = args[1] if name == "copy_" else args[0]
        target = args[0].device if name == "copy_" else kwargs.get("device")
        if source.device.type == "cpu" or target is None or torch.device(target).type != "cpu":
            return None
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _note(self, name: str, args: Any, kwargs: Any, result: Any, changes: list[Tensor]) -> None:
        inputs = _tensors((args, kwargs))
        read = self.sizes(inputs)
        change = self.sizes(changes)
        results = self.sizes(_tensors(result))
        created = {key: size for key, size in results.items() if key not in read}
        written = change | created
        if not written:
            return  # a view
        if name in OVERWRITE or "out" in kwargs:
            read = {key: size for key, size in read.items() if key not in change}
        if name in PICK:
            indices = (tensor.nbytes for tensor in inputs if not tensor.is_floating_point())
            most = max([*created.values(), *indices])
            read = {key: min(size, most) for key, size in read.items()}
            written = {key: min(size, most) for key, size in written.items()}
        sums = self._part not in UPDATES and bool(self.sums & {*change})
        compiled = self._compiled and not (sums or self._eager)
        part = SUMS if sums else self._part
        operation = _Operation(name, part, compiled, self._backward, read, written, {*change})
        operation.count_products(args)
        self._operations.append(operation)

    def sizes(self, tensors: Iterable[Tensor | None]) -> dict[int, float]:
        """Return the bytes that can be read from each storage."""
        sizes: dict[int, float] = {}
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
                size = min(tensor.numel() * tensor.itemsize, storage.nbytes())
                sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), size)
        return sizes

    def kernels(self, lasting: Iterable[Tensor | None]) -> Iterator[Kernel]:
        """Turn the operations into kernels; `lasting` tensors are read after the step."""
        numbers = count()  # each operation that does not fuse is a group

        def group(operation: _Operation) -> Any:
            if operation.fuses:
                return operation.part, operation.backward
            return next(numbers)

        groups = [[*members] for _, members in groupby(self._operations, group)]
        return _Fusion(groups, {*self.sizes(lasting)}).kernels()


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    tensors = []
    for index, declared in enumerate(declared_arguments(func)):
        written = declared.alias_info is not None and declared.alias_info.is_write
        if written and declared.name != "grads":  # fused updates write these only to unscale them
            value = args[index] if index < len(args) else kwargs.get(declared.name)
            tensors += _tensors(value)
    return tensors


@dataclass
class _Fusion:
    """Turns each group of operations into one kernel."""

    groups: list[list[_Operation]]
    lasting: set[int]  # storages that are read after the step
    readers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # groups
    changing: set[int] = field(default_factory=set)  # storages that operations modify
    # storage that is not written -> what is read instead of it
    instead: dict[int, dict[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, group in enumerate(self.groups):
            for operation in group:
                self.changing |= operation.changed
                for key in operation.read:
                    self.readers[key].append(number)

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels that move any bytes."""
        for number, group in enumerate(self.groups):
            if group[0].fuses:
                kernel = self._fused(number, group)
            else:
                kernel = group[0].alone()
            if kernel.read + kernel.written:
                yield kernel

    def _fused(self, number: int, group: list[_Operation]) -> Kernel:
        read: dict[int, float] = {}
        made: dict[int, float] = {}
        sources: dict[int, dict[int, float]] = {}  # inputs from outside of the group
        for operation in group:
            origin: dict[int, float] = {}
            for key, size in operation.read.items():
                inputs = sources[key] if key in made else self.instead.get(key, {key: size})
                origin |= inputs
                if key not in made:
                    read |= inputs
            for key, size in operation.written.items():
                made[key] = max(size, made.get(key, 0))
                sources[key] = origin
        written = [size for key, size in made.items() if self._stays(number, key, size, sources)]
        return Kernel(group[0].part, MEMORY, sum(read.values()), sum(written))

    def _stays(
        self, number: int, key: int, size: float, sources: dict[int, dict[int, float]]
    ) -> bool:
        """Return whether a storage is written to memory."""
        if key in self.lasting:
            return True
        later = [reader for reader in self.readers[key] if reader > number]
        fused = all(self.groups[reader][0].fuses for reader in later)
        smaller = sum(sources[key].values()) <= size
        if later and fused and smaller and not self.changing & {key, *sources[key]}:
            self.instead[key] = sources[key]
            return False
        return bool(later)
