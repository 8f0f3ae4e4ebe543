"""Adds the gradients of a step in one order, for equal bits on any number of ranks.

A step has K micro-batches of `batch.exact_micro_size` samples; each of W ranks computes K / W
neighbors. Their gradients are the leaves of one binary tree, added pairwise: the lower levels in a
rank as gradients arrive, the upper levels among ranks. The error of this sum grows with log2 K, of
a sequential sum with K (Higham 1993, "The accuracy of floating point summation").
"""

import contextlib
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning import Callback, Trainer
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.gathering import ALL_GATHER
from lockstep_gpt.errors import UserError
from lockstep_gpt.torch_patches import BatchNorm, compiling_one_graph


class PairwiseSum:
    """Adds n lists of tensors in the order of a binary tree, keeping at most log2(n + 1) sums.

    Its root adds the tree of the first m, the largest power of two below n, and that of the rest.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # of 2**level lists each, levels descending

    def add(self, tensors: list[Tensor]) -> None:
        """Add the next list, whose tensors may be changed from now on."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            torch._foreach_add_(tensors, self._sums.pop()[1])
            level += 1
        self._sums.append((level, tensors))

    def partial(self) -> list[list[Tensor]]:
        """Return the sums so far; the next list, plus each of them in order, is the sum of all."""
        return [tensors for _, tensors in reversed(self._sums)]

    def total(self) -> list[Tensor]:
        """Return the sum of all lists, in the memory of one of them, and start over."""
        first, *others = self.partial()
        for tensors in others:
            torch._foreach_add_(first, tensors)
        self._sums.clear()
        return first


class GradientSums(Callback):
    """Replaces DDP's sum of a step's gradients with one in the tree's order."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 1
        self.accumulation = 1
        self.undo = contextlib.ExitStack()  # restores what it changed in torch
        self._in_ddp = False
        self._rest = 1.0  # the mean's factor without its powers of two
        self._sums = PairwiseSum()
        self._parameters: list[Tensor] = []
        self._scattered: tuple[Any, Tensor, Tensor, Future[Tensor]] | None = None
        self._gathered: list[tuple[Any, Tensor, Tensor, Future[Tensor]]] = []
        self._side: Any = contextlib.nullcontext()  # the stream in which a GPU adds

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Take over the sum from DDP, or raise a `UserError` if the model has a BatchNorm."""
        if any(isinstance(layer, BatchNorm) for layer in pl_module.modules()):
            raise UserError(
                "batch.exact_micro_size is set, and the model has a BatchNorm, whose statistics "
                "differ by rank; use a norm over channels, or set batch.exact_micro_size=null"
            )
        self.world_size = trainer.world_size
        self.accumulation = trainer.accumulate_grad_batches
        leaves = self.world_size * self.accumulation
        power = 1 << (leaves.bit_length() - 1)  # a factor that is a power of two is exact
        self._rest = power / leaves
        pl_module.loss_factor = self.accumulation / power  # Lightning divides by the accumulation
        self._parameters = [
            parameter for parameter in pl_module.model.parameters() if parameter.requires_grad
        ]
        wrapped: Any = trainer.strategy.model
        self._in_ddp = isinstance(wrapped, DistributedDataParallel)
        if self._in_ddp:
            wrapped.register_comm_hook(None, self._exchange)
        if pl_module.device.type == "cuda":
            torch.use_deterministic_algorithms(True)  # again: Trainer sets what the user chose
            self._side = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Take the gradients of one micro-batch out; autograd would add the next ones to them."""
        is_last = pl_module.leaf == self.accumulation - 1
        if is_last and self._in_ddp:
            return  # `_exchange` added them
        missing = sum(parameter.grad is None for parameter in self._parameters)
        if missing:
            raise UserError(
                f"batch.exact_micro_size is set, and {missing} of {len(self._parameters)} "
                "parameters got no gradient; freeze them, or set batch.exact_micro_size=null"
            )
        self._sums.add([cast(Tensor, parameter.grad) for parameter in self._parameters])
        if not is_last:
            for parameter in self._parameters:
                parameter.grad = None
            return
        totals = self._sums.total()
        if self._rest != 1:
            torch._foreach_mul_(totals, self._rest)
        for parameter, total in zip(self._parameters, totals, strict=True):
            parameter.grad = total

    def on_train_end(self, *_: Any) -> None:
        """Restore what was changed in torch."""
        self.undo.close()

    on_exception = on_train_end  # type: ignore[assignment]

    def _exchange(self, _state: None, bucket: GradBucket) -> Future[Tensor]:
        """Add a bucket of the last micro-batch to this rank's sum, and that to the other ranks'.

        DDP calls this for one bucket after another while backward continues. Collectives start
        only here: gloo hangs on one that a future's callback starts.
        """
        for partial in self._sums.partial():
            sums = dict(zip(self._parameters, partial, strict=True))
            in_bucket = [sums[parameter] for parameter in bucket.parameters()]
            torch._foreach_add_(bucket.gradients(), in_bucket)
        if bucket.is_last():
            self._sums = PairwiseSum()
        buffer = bucket.buffer()
        if self.world_size == 2:  # a + b is b + a; of 2**n leaves no factor is left
            reduced = dist.all_reduce(buffer, async_op=True).get_future()
            return cast(Future[Tensor], reduced.then(lambda future: future.value()[0]))
        result: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if buffer.is_cuda:
            self._side.stream.wait_stream(torch.cuda.current_stream())
        with self._side:
            self._gather()  # what the last call scattered
            self._scatter(buffer, result)
            if bucket.is_last():
                self._gather()
                for work, _, gathered, future in self._gathered:
                    work.wait()
                    future.set_result(gathered)  # DDP uses as much of it as its bucket has
                self._gathered.clear()
        return result

    def _scatter(self, buffer: Tensor, result: Future[Tensor]) -> None:
        """Start sending each rank its slice of a bucket."""
        world = self.world_size
        rest = -len(buffer) % world
        sent = buffer
        if rest:
            sent = torch.nn.functional.pad(buffer, (0, rest))
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, async_op=True)
        self._scattered = work, received.view(world, -1), sent, result

    def _gather(self) -> None:
        """Add the ranks' parts of this rank's slice, and start sending the sum to all ranks."""
        if self._scattered is None:
            return
        work, parts, bucket, result = self._scattered
        self._scattered = None
        work.wait()
        sums = PairwiseSum()
        for part in parts.unbind():
            sums.add([part])
        total = sums.total()[0] * self._rest  # not in place: frees the parts
        work = ALL_GATHER(bucket, total, async_op=True)
        self._gathered.append((work, total, bucket, result))


def gradient_sums(config: Config) -> list[GradientSums]:
    """Return the callback that adds gradients in one order, if `batch.exact_micro_size` is set.

    It sets threads and kernels to round the same, until the run ends.
    """
    if config.batch.exact_micro_size is None:
        return []
    sums = GradientSums()
    sums.undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(config.batch.exact_threads)
    if config.compile:  # it would compile a part per DDP bucket, which one rank doesn't have
        sums.undo.enter_context(compiling_one_graph())
    if config.trainer["accelerator"] == "cuda":  # some kernels add in the order in which they end
        sums.undo.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS then
        torch.use_deterministic_algorithms(True)
        # cuDNN's attention adds in any order in backward. FlashAttention's and the memory-efficient
        # one have an order of their own, which the line above selects.
        cuda: Any = torch.backends.cuda
        sums.undo.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
        cuda.enable_cudnn_sdp(False)
    return [sums]
