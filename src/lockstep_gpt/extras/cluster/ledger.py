"""A training step on a GPU, kernel by kernel: bytes, operations, and waits of the host.

The step runs on tensors that have a shape but no content, and each operation is recorded with the
bytes that it reads and writes. Two rules turn operations into kernels. In eager code, each one is a
kernel. In compiled code, consecutive operations that are not matrix products, attention, gathers,
or scatters form one kernel. It reads its outside inputs once, and writes what others read. It does
not write a tensor that only such kernels read, if the tensor's inputs are no larger: those kernels
recompute it, as torch's partitioner makes them. No kernel spans forward and backward.

A kernel takes as long as its operations or its bytes, whichever is longer; `hardware.py` has the
fractions of the peaks that are reached. A step takes as long as its kernels, or as long as the
host needs to launch them. There is no other model of time: `plan` uses this one.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.peaks import in_form
from lockstep_gpt.extras.cluster.hardware import Hardware
from lockstep_gpt.extras.cluster.memory import as_on_a_gpu, changed, shaped, step
from lockstep_gpt.model import functional
from lockstep_gpt.model.gpt import GPT
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.torch_patches import declared_arguments
from lockstep_gpt.training.optim import build_optimizer

EMBEDDING, BLOCKS, LOSS, SUMS, UPDATE = PARTS = (
    "embedding",
    "blocks",
    "loss",
    "accumulation",  # of gradients, in each micro-batch but the first
    "optimizer",  # and clipping, once per step
)
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
        attends = self.kind == ATTENTION
        share = hardware.attention_share if attends else hardware.product_share
        peak = in_form(hardware.peak, self.form) or min(hardware.peak.values())
        return max(moving, self.flops / (peak * share))


@dataclass(frozen=True)
class Ledger:
    """The kernels of a micro-batch and of an update, with the number of each.

    Numbers for deep models are extrapolated from two shallow ones, so they may be negative.
    """

    kernels: Counter[Kernel]
    waits: int = 0  # how often the host waits for the device

    def of(self, *parts: str) -> Ledger:
        """Return the ledger of some parts of the step."""
        kernels = {each: times for each, times in self.kernels.items() if each.part in parts}
        return replace(self, kernels=Counter(kernels))

    def total(self, name: str) -> float:
        """Add up `read`, `written` or `flops`."""
        return float(sum(times * getattr(each, name) for each, times in self.kernels.items()))

    @property
    def moved(self) -> float:
        """Bytes moved between memory and processors."""
        return self.total("read") + self.total("written")

    def seconds(self, hardware: Hardware) -> float:
        """Return how long the device takes."""
        return sum(times * each.seconds(hardware) for each, times in self.kernels.items())

    def compute(self, accumulation: int, hardware: Hardware) -> float:
        """Return the seconds of a step's micro-batches, limited by the device or by the host."""
        model, sums = self.of(*MODEL), self.of(SUMS)
        device = accumulation * model.seconds(hardware)
        device += (accumulation - 1) * sums.seconds(hardware)
        launched = accumulation * model.kernels.total() + (accumulation - 1) * sums.kernels.total()
        return max(device, launched * hardware.launch)

    def deeper(self, other: Ledger, times: int) -> Ledger:
        """Return this ledger plus `times` times the difference from it to `other`."""
        kernels = Counter(self.kernels)
        for each in {*self.kernels, *other.kernels}:
            kernels[each] += times * (other.kernels[each] - self.kernels[each])
        return Ledger(kernels, self.waits + times * (other.waits - self.waits))


def ledger(config: Config, vocab_size: int, micro_size: int, memory: float | None = None) -> Ledger:
    """Return the ledger of training on a GPU.

    Args:
        config: the run's settings.
        vocab_size: V.
        micro_size: samples per micro-batch.
        memory: the device's memory in bytes, which decides how the loss is computed.
    """
    shapes = (replace(config.model, n_layer=layers) for layers in (1, 2))
    one, two = (trace(config, shape, vocab_size, micro_size, memory) for shape in shapes)
    return one.deeper(two, config.model.n_layer - 1)


def trace(
    config: Config,
    shape: ModelConfig,
    vocab_size: int,
    micro_size: int,
    memory: float | None = None,
) -> Ledger:
    """Return the ledger of a model of this shape; `ledger` explains the other arguments."""
    recorder = Recorder(config.compile)
    with FakeTensorMode():
        model = shaped(shape, vocab_size, config.precision)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        recorder.sums = set(recorder.sizes(weight.grad for weight in weights))
        optimizer = build_optimizer(model, config.optim, lr=config.optim.lr)
        with _half_products(optimizer):
            with Recorder():
                optimizer.step()  # creates its moments, which must exist from now on
            _record(recorder, model, optimizer, config, micro_size, memory)
    return Ledger(Counter(recorder.kernels([weight.grad for weight in weights])), recorder.waits)


def _record(
    recorder: Recorder,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    config: Config,
    micro_size: int,
    memory: float | None,
) -> None:
    groups = optimizer.param_groups
    counts = [
        optimizer.state[weight]["step"]  # Muon's counters are on the host
        for group in groups
        if group.get("muon")
        for weight in group["params"]
    ]
    recorder.host = {*recorder.sizes(counts)}
    whole = functional.WHOLE_SHARE * (memory or 0) / 4 if config.compile else 0
    gpu = as_on_a_gpu(max(whole, functional.MANY_LOGITS), functional.GPU_CHUNK_LOGITS)
    with gpu, recorder, recorder.watching(model):
        step(model, micro_size, config.model.block_size, config.precision)
        recorder.enter(UPDATE)
        if config.optim.clip_norm is not None:
            weights = [weight for group in groups for weight in group["params"]]
            torch.nn.utils.clip_grad_norm_(weights, config.optim.clip_norm)
        optimizer.step()


def _half_products(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Make Muon multiply in bfloat16, as it does on GPUs."""
    module = sys.modules[type(optimizer).__module__]
    if not hasattr(module, "_product_type"):
        return contextlib.nullcontext()
    return changed(module, _product_type=lambda _: torch.bfloat16)


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
        return ATTENTION if "attention" in self.name else MEMORY

    @property
    def fuses(self) -> bool:
        return self.compiled and self.kind == MEMORY and self.name not in MOVES

    def alone(self) -> Kernel:
        read, written = sum(self.read.values()), sum(self.written.values())
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
        self._operations: list[_Operation] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive so that no key is reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default's guard against compilation costs a second of imports

    def enter(self, part: str, backward: bool = False) -> None:
        """Set the part of the step that the next operations belong to."""
        self._part, self._backward = part, backward

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
            begin = partial(entering, part=BLOCKS, before=EMBEDDING)
            hooks.append(first.register_forward_pre_hook(lambda _, values: begin(values[0])))
        with changed(functional, linear_cross_entropy=loss_of):
            yield
        for hook in hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and record it; values that the host would wait for are zero."""
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name == "_local_scalar_dense":
            self.waits += not self.host.issuperset(self.sizes(args))
            return 0
        if name in TO_HOST and (target := self._host(name, args, kwargs)) is not None:
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
        given = _tensors((args, kwargs))
        read, change = self.sizes(given), self.sizes(changes)
        made = {key: size for key, size in self.sizes(_tensors(result)).items() if key not in read}
        if not (written := change | made):
            return  # a view
        if name in OVERWRITE or "out" in kwargs:
            read = {key: size for key, size in read.items() if key not in change}
        if name in PICK:
            indices = (each.nbytes for each in given if not each.is_floating_point())
            most = max([*made.values(), *indices])
            read = {key: min(size, most) for key, size in read.items()}
            written = {key: min(size, most) for key, size in written.items()}
        sums = self._part != UPDATE and bool(self.sums & {*change})
        compiled = self._compiled and not (sums or self._part == UPDATE)
        part = SUMS if sums else self._part
        noted = _Operation(name, part, compiled, self._backward, read, written, {*change})
        if noted.kind == PRODUCT:
            left, right = args[:2] if name in ("mm", "bmm") else args[1:3]
            noted.flops = 2.0 * left.numel() * right.shape[-1]
            noted.form = FORMS.get(left.dtype, "bf16")
        elif noted.kind == ATTENTION:
            backward = "backward" in name
            query, key = args[1:3] if backward else args[:2]
            # Two products; the causal mask halves the work.
            noted.flops = 2.0 * query.numel() * key.shape[-2]
            noted.flops *= BACKWARD_OF_ATTENTION if backward else 1
            noted.form = FORMS.get(query.dtype, "bf16")
        self._operations.append(noted)

    def sizes(self, tensors: Iterable[Tensor | None]) -> dict[int, float]:
        """Return the bytes that can be read from each storage."""
        sizes: dict[int, float] = {}
        for each in tensors:
            if each is not None:
                storage = each.untyped_storage()
                self._storages[storage._cdata] = storage
                size = min(each.numel() * each.itemsize, storage.nbytes())
                sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), size)
        return sizes

    def kernels(self, kept: Iterable[Tensor | None]) -> Iterator[Kernel]:
        """Turn the operations into kernels; `kept` are tensors read after the step."""
        numbers = count()  # each operation that does not fuse is a group

        def group(noted: _Operation) -> Any:
            return (noted.part, noted.backward) if noted.fuses else next(numbers)

        groups = [[*each] for _, each in groupby(self._operations, group)]
        return _Fusion(groups, {*self.sizes(kept)}).kernels()


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    found = []
    for index, declared in enumerate(declared_arguments(func)):
        written = declared.alias_info is not None and declared.alias_info.is_write
        if written and declared.name != "grads":  # fused updates write these only to unscale them
            found += _tensors(args[index] if index < len(args) else kwargs.get(declared.name))
    return found


@dataclass
class _Fusion:
    """Turns each group of operations into one kernel."""

    groups: list[list[_Operation]]
    kept: set[int]
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
            kernel = self._fused(number, group) if group[0].fuses else group[0].alone()
            if kernel.read + kernel.written:
                yield kernel

    def _fused(self, number: int, group: list[_Operation]) -> Kernel:
        read: dict[int, float] = {}
        made: dict[int, float] = {}
        sources: dict[int, dict[int, float]] = {}  # inputs from outside of the group
        for operation in group:
            origin: dict[int, float] = {}
            for key, size in operation.read.items():
                found = sources[key] if key in made else self.instead.get(key, {key: size})
                origin |= found
                if key not in made:
                    read |= found
            for key, size in operation.written.items():
                made[key] = max(size, made.get(key, 0))
                sources[key] = origin
        written = [size for key, size in made.items() if self._stays(number, key, size, sources)]
        return Kernel(group[0].part, MEMORY, sum(read.values()), sum(written))

    def _stays(
        self, number: int, key: int, size: float, sources: dict[int, dict[int, float]]
    ) -> bool:
        """Return whether a storage is written to memory."""
        if key in self.kept:
            return True
        later = [reader for reader in self.readers[key] if reader > number]
        fused = all(self.groups[reader][0].fuses for reader in later)
        smaller = sum(sources[key].values()) <= size
        if later and fused and smaller and not self.changing & {key, *sources[key]}:
            self.instead[key] = sources[key]
            return False
        return bool(later)
