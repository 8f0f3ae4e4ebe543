"""Run a model on tensors that have a shape but no content, and count the bytes that are alive."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep import functional
from lockstep.building import build
from lockstep.errors import UserError

# A model of tokens whose parts can be counted: it has these names.
LanguageModel: TypeAlias = Any
COUNTED = ("block_size", "vocab_size", "n_layer", "num_parameters", "flops_per_token", "head")
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

_FILLED_AT_RANDOM = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages created inside it, for as long as they exist.

    Args:
        before: tensors that already exist; operations return views of them.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._counted = {tensor.untyped_storage()._cdata for tensor in before}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default's guard against compilation costs a second of imports

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count the storages that it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._discount, key, storage.nbytes())

    def _discount(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size


class _Uninitialized(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skips random initialization: tensors without content need no values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as above

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLED_AT_RANDOM:
            return args[0]
        return func(*args, **(kwargs or {}))


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
def as_on_a_gpu() -> Iterator[None]:
    """Compute attention as on a GPU, on CPU tensors.

    It is fused at any length, and with dropout, whose mask backward draws again.
    """
    usual = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        return usual(*args, **{**kwargs, "dropout_p": 0.0})

    with changed(F, scaled_dot_product_attention=attention), changed(functional, SHORT=0):
        yield


def shaped(shape: DictConfig, vocab_size: int, precision: str) -> LanguageModel:
    """Build a model without initializing its weights."""
    with _Uninitialized():  # type: ignore[no-untyped-call]
        return built(shape, vocab_size, precision)


def built(shape: DictConfig, vocab_size: int, precision: str) -> LanguageModel:
    """Build a model with weights of the type that training in `precision` uses.

    Args:
        shape: the node `model` of a configuration.
        vocab_size: V.
        precision: Lightning's name for the precision.

    Raises:
        UserError: no such model exists, or it lacks what is counted.
    """
    usual = torch.get_default_dtype()
    if precision == "64-true":
        torch.set_default_dtype(torch.float64)
    try:
        model = build(shape, vocab_size=vocab_size)
    finally:
        torch.set_default_dtype(usual)
    lacking = [name for name in COUNTED if not hasattr(model, name)]
    if lacking:
        raise UserError(
            f"model._target_={shape['_target_']} has no {lacking[0]}, so its parts cannot be "
            "counted; choose another model, such as model=gpt2"
        )
    return model


def trace_peak(
    shape: DictConfig,
    vocab_size: int,
    micro_size: int,
    precision: str,
    accelerator: str,
    half_blocks: bool = False,
) -> int:
    """Return the most bytes alive at once in forward and backward, without weights and gradients.

    Args:
        shape: the node `model` of a configuration.
        vocab_size: V.
        micro_size: number of samples of `block_size` tokens.
        precision: Lightning's name for the precision.
        accelerator: cuda or cpu.
        half_blocks: the blocks' weights and activations are bfloat16.
    """
    with FakeTensorMode():
        model = shaped(shape, vocab_size, precision)
        if half_blocks:
            for block in getattr(model, "blocks", ()):
                _halve(block)
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        attention = as_on_a_gpu() if accelerator == "cuda" else contextlib.nullcontext()
        count = LiveBytes(model.parameters())
        with attention, count:
            step(model, micro_size, shape.block_size, precision)
    return count.peak


def _halve(block: nn.Module) -> None:
    """Convert `block`'s weights, and the activations that enter it, to bfloat16."""
    for part in block.modules():
        for name, weight in [*part.named_parameters(recurse=False)]:
            setattr(part, name, nn.Parameter(weight.detach().bfloat16()))
    block.register_forward_pre_hook(
        lambda _, values: tuple(value.bfloat16() for value in values)  # only activations are passed
    )


def _drop_gradient(weight: Tensor) -> None:
    """Drop a finished gradient; `States` has already counted its memory."""
    weight.grad = None


def step(model: LanguageModel, micro_size: int, block_size: int, precision: str) -> None:
    """Run forward and backward once on `micro_size` samples of `block_size` tokens."""
    device = next(model.parameters()).device
    tokens = torch.zeros(micro_size, block_size, dtype=torch.int64, device=device)
    with _autocast(precision, device.type):
        loss = model(tokens, torch.zeros_like(tokens))
    loss.backward()


@contextlib.contextmanager
def _autocast(precision: str, device: str) -> Iterator[None]:
    with torch.autocast(device, AUTOCAST.get(precision), enabled=precision in AUTOCAST):
        yield
