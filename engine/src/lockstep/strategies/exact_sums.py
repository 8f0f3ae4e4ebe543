"""Adds the gradients of a step in one order, for equal bits on any number of ranks.

A step has K micro-batches of `batch.exact_micro_size` samples; each of W ranks computes K / W
neighbors. Their gradients are the leaves of one binary tree, added pairwise: the lower levels in a
rank as gradients arrive, the upper levels among ranks. The error of this sum grows with log2 K, of
a sequential sum with K (Higham 1993, "The accuracy of floating point summation").
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch import strategies
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from lockstep.errors import UserError
from lockstep.patches.torch import BatchNorm
from lockstep.ranks.gathering import ALL_GATHER
from lockstep.strategies.optimizers import PreparesOptimizers


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


class ExactSums:
    """The sum of a step's gradients in the tree's order, on any number of ranks.

    Args:
        module: whose gradients are added.
        world_size: number of ranks.
        device: where it computes.
        in_ddp: whether DDP calls `exchange` for the last micro-batch of a step.

    Raises:
        UserError: the module has a BatchNorm.
    """

    def __init__(
        self, module: nn.Module, world_size: int, device: torch.device, in_ddp: bool
    ) -> None:
        if any(isinstance(layer, BatchNorm) for layer in module.modules()):
            raise UserError(
                "batch.exact_micro_size is set, and the model has a BatchNorm, whose statistics "
                "differ by rank; use a norm over channels, or set batch.exact_micro_size=null"
            )
        self.world_size = world_size
        self._in_ddp = in_ddp
        self._parameters: list[Tensor] = [
            weight for weight in module.parameters() if weight.requires_grad
        ]
        self._rest = 1.0  # the mean's factor without its powers of two
        self._sums = PairwiseSum()
        self._scattered: tuple[Any, Tensor, Tensor, Future[Tensor]] | None = None
        self._gathered: list[tuple[Any, Tensor, Tensor, Future[Tensor]]] = []
        self._side: Any = contextlib.nullcontext()  # the stream in which a GPU adds
        if device.type == "cuda":
            self._side = torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def factor(self, accumulation: int) -> float:
        """Return by what to multiply a loss that is divided by the accumulation already.

        Only a factor that is a power of two is exact: `add` and `exchange` multiply with the rest.
        """
        leaves = self.world_size * accumulation
        power = 1 << (leaves.bit_length() - 1)
        self._rest = power / leaves
        return accumulation / power

    def add(self, is_last: bool) -> None:
        """Take the gradients of one micro-batch out; autograd would add the next ones to them.

        After the last one of a step, the sum is the gradient.

        Raises:
            UserError: a parameter got no gradient.
        """
        if is_last and self._in_ddp:
            return  # `exchange` added them
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

    def exchange(self, _state: None, bucket: GradBucket) -> Future[Tensor]:
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


class AddsGradients(PreparesOptimizers):
    """A mixin of strategies: decides how the gradients of a step are added.

    Callbacks see them once they are complete: in the last micro-batch, the sum of the step.

    Args:
        exact_threads: adds gradients in one order, for equal bits on any number of ranks, each of
            which computes with so many threads; None: adds them as the strategy does.
        arguments: of the strategy.
    """

    def __init__(self, *arguments: Any, exact_threads: int | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.exact_threads = exact_threads
        self.exact: ExactSums | None = None
        self._kernels = contextlib.ExitStack()
        self._is_updating = False

    def setup(self, trainer: Trainer) -> None:
        """Choose threads and kernels that always round alike."""
        if self.exact_threads is not None and trainer.state.fn == TrainerFn.FITTING:
            module: Any = self.lightning_module
            refuse_partial_trees(trainer.world_size, trainer.accumulate_grad_batches)
            self._kernels.enter_context(exact_kernels(self.exact_threads, self.root_device.type))
            in_ddp = isinstance(self, strategies.DDPStrategy)
            self.exact = ExactSums(module, trainer.world_size, self.root_device, in_ddp)
        super().setup(trainer)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **settings: Any
    ) -> Any:
        """Update; Lightning computes the last micro-batch of a step in here."""
        self._is_updating = True
        try:
            return super().optimizer_step(optimizer, closure, model, **settings)
        finally:
            self._is_updating = False

    def backward(
        self, closure_loss: Tensor, optimizer: Any, *arguments: Any, **settings: Any
    ) -> Tensor:
        """Compute the gradients of a micro-batch, as Lightning does, and complete them."""
        module = self.lightning_module
        assert module is not None
        is_last = self._is_updating or not module.automatic_optimization
        self.before_gradients(is_last)
        self.pre_backward(closure_loss)
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        scaled = loss
        if self.exact is not None:
            scaled = loss * self.exact.factor(module.trainer.accumulate_grad_batches)
        self.precision_plugin.backward(scaled, module, optimizer, *arguments, **settings)
        self.after_gradients(is_last)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def before_gradients(self, is_last: bool) -> None:
        """Prepare the backward of a micro-batch; `is_last`: the update follows."""

    def after_gradients(self, is_last: bool) -> None:
        """Complete the gradients of a micro-batch; `is_last`: the update follows."""
        if self.exact is not None:
            self.exact.add(is_last)

    def teardown(self) -> None:
        """Restore threads and kernels."""
        self._kernels.close()
        self.exact = None
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Restore threads and kernels."""
        self._kernels.close()
        super().on_exception(exception)


class SingleDeviceStrategy(AddsGradients, strategies.SingleDeviceStrategy):
    """Lightning's, for one rank, also with the exact sums of several.

    Args:
        device: where it computes; None: the first device of the Trainer's accelerator.
        exact_threads: see `AddsGradients`.
    """

    def __init__(
        self, device: torch.device | None = None, exact_threads: int | None = None
    ) -> None:
        super().__init__(device or "cpu", exact_threads=exact_threads)
        self._device = device

    @property
    def root_device(self) -> torch.device:
        """The device; Lightning's own strategy must know it before the Trainer does."""
        if self._device is None and self.accelerator is not None:
            kind = self.accelerator
            return cast(torch.device, kind.get_parallel_devices(kind.parse_devices(1))[0])
        return super().root_device


def refuse_partial_trees(world_size: int, accumulation: int) -> None:
    """Raise a `UserError` if a rank's micro-batches aren't a whole subtree of the step's.

    Then the sum would depend on the number of ranks. One rank has the whole tree.
    """
    if world_size == 1 or accumulation & (accumulation - 1) == 0:
        return
    lower = 1 << (accumulation.bit_length() - 1)
    raise UserError(
        f"accumulate_grad_batches={accumulation} on {world_size} ranks adds gradients in another "
        f"order than one rank does; exact sums need a power of two: set "
        f"accumulate_grad_batches={lower} or {2 * lower}"
    )


@contextlib.contextmanager
def exact_kernels(threads: int, device: str) -> Iterator[None]:
    """Let threads and kernels round the same in this context, in every start of a run.

    Args:
        threads: of this process.
        device: where it computes: cpu, cuda, or mps.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        if device == "cuda":  # some kernels add in the order in which they end
            undo.callback(
                torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
            )
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS then
            torch.use_deterministic_algorithms(True)
            # cuDNN's attention adds in any order in backward. FlashAttention's and the
            # memory-efficient one have an order of their own, which the line above selects.
            cuda: Any = torch.backends.cuda
            undo.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
            cuda.enable_cudnn_sdp(False)
        yield
