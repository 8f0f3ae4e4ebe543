"""Count what a training step needs, from shapes alone.

Forward and backward run on tensors that have a shape but no content ("fake"), so this takes a
moment, and no device. Every storage is counted from its creation until it is freed.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from lockstep import functional
from lockstep.errors import UserError

Loss = Callable[[nn.Module, Any], Tensor]
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
FEWEST = 2  # samples of a micro-batch that is traced: a BatchNorm refuses a single number
PASSES = 3  # forward, and backward, which takes twice as long (Kaplan et al. 2020, section 2.1)


def loss_of(model: nn.Module, example: Any) -> Tensor:
    """Return `model(*example)`, or `model(**example)` for a dict, which must be the loss."""
    arguments = example if isinstance(example, list | tuple) else (example,)
    loss: Tensor = model(**example) if isinstance(example, dict) else model(*arguments)
    return loss


@dataclass(frozen=True)
class Traced:
    """What a forward and backward of one micro-batch needs."""

    peak: int  # the most bytes alive at once, without weights and gradients
    kernels: int  # operations whose result is a new tensor
    logits: int  # of `functional.linear_cross_entropy`; 0: it isn't used
    stream: int  # bytes of the first block's input; 0: there are no blocks


@dataclass(frozen=True)
class Device:
    """The device whose kernels run: they differ in attention and in the loss of tokens."""

    accelerator: str  # cuda or cpu
    memory: float  # bytes
    compiled: bool = False

    @property
    def whole_logits(self) -> int:
        """Logits of the largest micro-batch for which `linear_cross_entropy` has them at once."""
        if self.accelerator == "cpu":
            return functional.MANY_LOGITS
        if self.compiled:
            return int(functional.WHOLE_SHARE * self.memory / 4)
        return functional.GPU_CHUNK_LOGITS


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages created inside it, for as long as they exist.

    Args:
        before: tensors that already exist; operations return views of them.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.kernels = 0  # operations that created a storage
        self._counted = {tensor.untyped_storage()._cdata for tensor in before}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default's guard against compilation costs a second of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        created = [
            self._count(leaf.untyped_storage())
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        self.kernels += any(created)
        return result

    def _count(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage; return whether it is new."""
        key = storage._cdata
        if key in self._counted:
            return False
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._discount, key, storage.nbytes())
        return True

    def _discount(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


class Uninitialized(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips random initialization: tensors without content need no values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default):
            return args[0]
        return func(*args, **(kwargs or {}))


def copied(
    model: nn.Module, precision: str, device: str, parts: Sequence[nn.Module] = ()
) -> tuple[nn.Module, list[nn.Module]]:
    """Return a copy of a model, and of some of its parts, with new weights of the same shapes.

    Weights that the model ties stay tied. Under 64-true they are float64, as in training.

    Args:
        model: on any device, also meta.
        precision: Lightning's name for the precision.
        device: of the new weights; under FakeTensorMode, they have no content on any device.
        parts: modules in the model.
    """
    known: dict[int, Any] = {}  # id of what deepcopy has copied -> its copy
    for weight in [*model.parameters(), *model.buffers()]:
        form: Any = {"device": device, "dtype": _type_in(precision, weight)}
        new = torch.empty_strided(weight.shape, weight.stride(), **form)
        if isinstance(weight, nn.Parameter):
            new = nn.Parameter(new, requires_grad=weight.requires_grad)
        known[id(weight)] = new
    new_model = copy.deepcopy(model, known)
    return new_model, [known[id(part)] for part in parts]


def _type_in(precision: str, tensor: Tensor) -> torch.dtype:
    is_double = precision == "64-true" and tensor.is_floating_point()
    return torch.float64 if is_double else tensor.dtype


def _micro_batch(example: Any, samples: int, precision: str) -> Any:
    """Return a batch of so many samples of the example's shapes and types."""

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        return torch.empty((samples, *leaf.shape[1:]), dtype=_type_in(precision, leaf))

    return tree_map(resized, example)


def flops_per_sample(model: nn.Module, example: Any, loss: Loss, precision: str) -> int:
    """Return the floating-point operations of a sample in forward and backward.

    They are those of matrix products, convolutions, and attention, where a causal mask leaves half;
    3 times forward's, so that what backward computes again doesn't count.
    """
    counter = FlopCounterMode(display=False)
    of_attention: list[int] = []

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *others: Any, is_causal: bool = False, **_: Any
    ) -> Tensor:
        flops = 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        is_causal = is_causal or others[2:3] == (True,)  # after a mask and a share of dropout
        of_attention.append(flops // 2 if is_causal else flops)
        return q.new_empty((*q.shape[:-1], v.shape[-1]))

    with FakeTensorMode(allow_non_fake_inputs=True), _explained(model):
        new_model, _ = copied(model, precision, "cpu")
        batch = _micro_batch(example, FEWEST, precision)
        with _attention_by(attention), torch.no_grad(), counter, _autocast(precision):
            loss(new_model, batch)
    return PASSES * (counter.get_total_flops() + sum(of_attention)) // FEWEST


def sample_bytes(example: Any) -> int:
    """Return the bytes of one of the example's samples."""
    leaves = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.ndim]
    return sum(leaf.nbytes // len(leaf) for leaf in leaves)


def trace(
    model: nn.Module,
    example: Any,
    loss: Loss,
    samples: int,
    precision: str,
    device: Device,
    blocks: Sequence[nn.Module] = (),
    half_blocks: bool = False,
) -> Traced:
    """Run forward and backward of one micro-batch, and count.

    Args:
        model: what is trained.
        example: a batch of at least one sample; tensors have samples in their first dimension.
        loss: of the model and a batch.
        samples: of the micro-batch.
        precision: Lightning's name for the precision.
        device: whose kernels run.
        blocks: the parts of the model that repeat.
        half_blocks: the blocks' weights and activations are bfloat16, as under
            `strategy.param_dtype=bfloat16`.

    Raises:
        UserError: the step depends on the values of tensors.
    """
    streams = [0]

    def note_stream(_: nn.Module, values: tuple[Any, ...]) -> None:
        streams[0] = sum(value.nbytes for value in values[:1] if isinstance(value, Tensor))

    with FakeTensorMode(allow_non_fake_inputs=True), _explained(model):
        new_model, new_blocks = copied(model, precision, "cpu", blocks)
        for block in new_blocks[:1]:
            block.register_forward_pre_hook(note_stream)
        for block in new_blocks if half_blocks else ():
            _halve(block)
        for weight in new_model.parameters():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        batch = _micro_batch(example, samples, precision)
        before = [*new_model.parameters(), *new_model.buffers(), *tree_leaves(batch)]
        count = LiveBytes(each for each in before if isinstance(each, Tensor))
        with kernels_of(device) as losses, count:
            step(new_model, batch, loss, precision)
    return Traced(count.peak, count.kernels, sum(losses), streams[0])


def step(model: nn.Module, batch: Any, loss: Loss, precision: str) -> None:
    """Run forward and backward once, on the device of the model's weights.

    Raises:
        UserError: the loss isn't one number.
    """
    with _autocast(precision, next(model.parameters()).device.type):
        value: Any = loss(model, batch)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UserError(
            f"loss returned {found}, and must return a tensor of one number: pass "
            "loss=lambda model, batch: ..."
        )
    value.backward()  # type: ignore[no-untyped-call]


def moment_bytes(optimizer: Callable[..., Optimizer], model: nn.Module, precision: str) -> int:
    """Return the bytes that an optimizer keeps after its first step, in the tensors of its state.

    AdamW has a mean of gradients and one of their squares; Muon has a single momentum.

    Args:
        optimizer: returns the optimizer of named weights.
        model: whose weights they are.
        precision: Lightning's name for the precision.

    Raises:
        UserError: the optimizer's step depends on the values of tensors.
    """
    # Most optimizers step on either kind of tensors without content, some on only one.
    for mode, device in ((FakeTensorMode(), "cpu"), (contextlib.nullcontext(), "meta")):
        with mode, contextlib.suppress(DataDependentOutputException, RuntimeError):
            new_model, _ = copied(model, precision, device)
            made = optimizer(new_model.named_parameters())
            for weight in new_model.parameters():
                weight.grad = torch.empty_like(weight) if weight.requires_grad else None
            made.step()
            kept = [value for state in made.state.values() for value in state.values()]
            return sum(value.nbytes for value in kept if isinstance(value, Tensor) and value.ndim)
    raise UserError(
        "the optimizer's first step depends on the values of tensors, so that its state can't be "
        "counted: pass optimizer=NUMBER, the numbers that it keeps for each weight"
    )


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turn torch's error for a step that depends on values into one line."""
    try:
        yield
    except DataDependentOutputException as error:
        raise UserError(
            f"the step of {type(model).__name__} depends on the values of tensors ({error}), so "
            "that shapes don't tell what it needs; pass a loss that doesn't"
        ) from error


@contextlib.contextmanager
def _autocast(precision: str, device: str = "cpu") -> Iterator[None]:
    with torch.autocast(device, AUTOCAST.get(precision), enabled=precision in AUTOCAST):
        yield


def _halve(block: nn.Module) -> None:
    """Convert `block`'s weights, and the activations that enter it, to bfloat16."""
    for part in block.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(weight.detach().bfloat16()))
    block.register_forward_pre_hook(
        lambda _, values: tuple(value.bfloat16() for value in values)  # only activations are passed
    )


def _drop_gradient(weight: Tensor) -> None:
    """Drop a finished gradient; its memory is counted with the states."""
    weight.grad = None


# The kernels of a GPU


@contextlib.contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Replace values in a module for a while.

    A TorchFunctionMode would not work: backward, which may recompute blocks, is not inside it.
    """
    usual = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(usual)


@contextlib.contextmanager
def _attention_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """Compute attention by a function, at any length."""
    with changed(F, scaled_dot_product_attention=function), changed(functional, SHORT=0):
        yield


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[list[int]]:
    """Compute as on a device, on CPU tensors; give the list of numbers of logits of each loss."""
    usual = functional.linear_cross_entropy
    usual_attention = F.scaled_dot_product_attention
    losses: list[int] = []

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        """Compute without dropout, whose mask a GPU's backward draws again."""
        return usual_attention(*args, **{**kwargs, "dropout_p": 0.0})

    def noted(features: Tensor, head: Tensor, vocab_size: int, targets: Tensor) -> Tensor:
        losses.append(targets.numel() * len(head))
        if device.compiled and losses[-1] <= device.whole_logits:
            return _compiled_loss(features, head)
        return usual(features, head, vocab_size, targets)

    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(functional, linear_cross_entropy=noted))
        if device.accelerator == "cuda":
            chunk = functional.GPU_CHUNK_LOGITS
            stack.enter_context(changed(functional, CHUNK_LOGITS=chunk))
            stack.enter_context(_attention_by(attention))
        yield losses


def _compiled_loss(features: Tensor, head: Tensor) -> Tensor:
    """Return a number by the products of a compiled loss, which keeps logits in their type only."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        features, head = features.to(dtype), head.to(dtype)
    loss: Tensor = _Logits.apply(features.flatten(0, -2), head)  # type: ignore[no-untyped-call]
    return loss


class _Logits(torch.autograd.Function):
    """Logits, (N, V padded), and then their gradient, besides which nothing has their size."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, head: Tensor) -> Tensor:
        logits = features @ head.T
        ctx.save_for_backward(features, head, logits)
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        features, head, logits = ctx.saved_tensors
        slope = torch.empty_like(logits)
        return slope @ head, slope.T @ features
