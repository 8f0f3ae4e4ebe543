"""DDP: every rank has the whole model, and gradients are added while backward runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch import strategies
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.patches.lightning import skip_teardown
from lockstep.patches.torch import compiling_one_graph, without_hooks
from lockstep.ranks.mean_of_counts import MeanOfCounts
from lockstep.ranks.ranks import backend_here
from lockstep.settings import check
from lockstep.strategies.exact_sums import AddsGradients
from lockstep.strategies.optimizers import is_compiled

# A state and a function of torch.distributed.algorithms.ddp_comm_hooks.
CommHook = tuple[Any, Callable[..., Any]]
COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
LEAST_CUT_MB = 1  # torch can't cut a compiled model at smaller buckets


class DDPStrategy(AddsGradients, MeanOfCounts, strategies.DDPStrategy):
    """Lightning's, which adds the gradients of a step with the same bits after any restart.

    Args:
        split_graph: whether torch cuts a compiled model at the borders of buckets, so that they are
            sent while backward goes on; `auto`: only where that hides more than it costs.
        exact_threads: adds gradients in one order, for equal bits on any number of ranks, each of
            which computes with so many threads; None: averages them as DDP does.
        comm_hook: compresses gradients; see `DistributedDataParallel.register_comm_hook`.
        arguments: Lightning's, and those of torch's `DistributedDataParallel`.
    """

    def __init__(
        self,
        split_graph: bool | str = True,
        exact_threads: int | None = None,
        comm_hook: CommHook | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(exact_threads=exact_threads, **arguments)
        self.split_graph = split_graph
        self._settings = arguments
        self._bucket_mb = arguments.get("bucket_cap_mb", LEAST_CUT_MB)
        self.comm_hook = comm_hook
        self._compiling = ExitStack()
        self._first_step: FirstStep | None = None
        self._kept: list[tuple[nn.Parameter, Tensor]] = []  # weights, and their place in a bucket
        self._step_begins = True

    def on_validation_start(self) -> None:
        """Give all ranks the buffers of rank 0, such as the statistics of BatchNorm."""
        super().on_validation_start()
        model = self.model
        if isinstance(model, DistributedDataParallel) and model.broadcast_buffers:
            for buffer in model.module.buffers():
                dist.broadcast(buffer, 0, model.process_group)

    def validation_step(self, *arguments: Any, **settings: Any) -> Any:
        """Validate without DDP, which would exchange buffers: ranks may differ by a batch."""
        module: Any = self.lightning_module
        with self.precision_plugin.val_step_context():
            return module.validation_step(*arguments, **settings)

    @property
    def loses_error(self) -> bool:
        """Whether the exchange of gradients has an error of earlier steps, which no state has."""
        return self.comm_hook is not None and self.comm_hook[0] is not None

    def copies_gradients(self, accumulation: int) -> bool:
        """Return whether buckets are a second copy, in steps of so many micro-batches."""
        return has_bucket_copies(self._settings, accumulation)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay in DDP's buckets, where micro-batches are added to them."""
        if self._first_step is not None:
            return self._first_step.keeps
        return bool(self._kept)

    def setup(self, trainer: Trainer) -> None:
        """Decide first whether the model is compiled in one piece.

        Raises:
            UserError: a setting doesn't go with the model or the devices.
        """
        self._refuse_unfit()
        self._compiling.enter_context(self.compiling(trainer.accumulate_grad_batches))
        super().setup(trainer)

    def _refuse_unfit(self) -> None:
        assert self.lightning_module is not None
        fits = self._bucket_mb >= LEAST_CUT_MB or not is_compiled(self.lightning_module)
        rule = f"is too small for compile=true; set {LEAST_CUT_MB} or more, or compile=false"
        check("strategy.bucket_cap_mb", self._bucket_mb, fits, rule)
        is_bf16 = self.comm_hook is not None and self.comm_hook[1].__name__ == "bf16_compress_hook"
        rule = "needs GPUs and NCCL; set strategy.comm_hook=fp16 or none"
        check("strategy.comm_hook", "bf16", not is_bf16 or backend_here() == "nccl", rule)

    def configure_ddp(self) -> None:
        """Wrap the module; broadcast buffers only if some are saved, like BatchNorm's."""
        refuse_unsynchronized(self.model, self.root_device, self.world_size)
        super().configure_ddp()
        module: Any = self.lightning_module
        wrapped: Any = self.model
        if module.state_dict().keys().isdisjoint(name for name, _ in module.named_buffers()):
            wrapped.broadcast_buffers = False  # the argument has two names, by torch version
        trainer: Trainer = module.trainer
        if self.exact is None and module.automatic_optimization:
            self._first_step = first_step_of(wrapped, trainer)
        elif wrapped.static_graph and trainer.accumulate_grad_batches > 1:
            self._first_step = FirstStep(wrapped, passes=0, keeps=False)
        if self.exact is not None:
            wrapped.register_comm_hook(None, self.exact.exchange)
        elif self._first_step is None:
            self._compress()

    def teardown(self) -> None:
        """Restore torch's setting, and free the gradients, which would outlive DDP."""
        self._compiling.close()
        for weight, _ in self._kept:
            weight.grad = None
        self._kept = []
        self._first_step = None
        super().teardown()

    def compiling(self, micro_batches: int) -> AbstractContextManager[Any]:
        """Return a context in which a model for steps of so many micro-batches is compiled."""
        if self.exact is None and self.splits_graph(micro_batches):
            return nullcontext()
        return compiling_one_graph()

    def splits_graph(self, micro_batches: int) -> bool:
        """Return whether a compiled model is cut, in a step of so many micro-batches.

        Cuts cost time in each micro-batch, some 5 % on a GPU. They hide the one exchange of a step,
        which takes long only between machines, and matters little after several micro-batches.
        """
        if self.split_graph == "auto":
            return self.num_nodes > 1 and micro_batches == 1
        return bool(self.split_graph)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Exchange no gradients in this context, except where `static_graph` needs it.

        Torch fails if the first backward of a static graph is one without an all-reduce.
        """
        if self._first_step is not None and self._first_step.needs_exchange():
            yield
        else:
            with super().block_backward_sync():
                yield

    def before_gradients(self, is_last: bool) -> None:
        """Put gradients back in their buckets, as zeros, and watch those of the first step."""
        if self._step_begins:
            absent = [(weight, place) for weight, place in self._kept if weight.grad is None]
            if absent:
                torch._foreach_zero_([place for _, place in absent])
            for weight, place in absent:
                weight.grad = place
        self._step_begins = is_last
        if self._first_step is None or (is_last and self._is_exchanged_elsewhere()):
            return
        if self._first_step.needs_gradients(is_last):
            self._first_step.watch()

    def after_gradients(self, is_last: bool) -> None:
        """End the first step of this process with the sums that later steps compute."""
        if self._first_step is not None:
            self._first_step.unwatch()
            if not is_last:
                self._first_step.restore()
            elif not self._is_exchanged_elsewhere():  # else the next step is DDP's first
                self._kept = self._first_step.end(self._compress)
                self._first_step = None
        super().after_gradients(is_last)

    def _is_exchanged_elsewhere(self) -> bool:
        """Return whether a callback keeps DDP from exchanging the gradients of this step."""
        wrapped: Any = self.model
        return not wrapped.require_backward_grad_sync

    def _compress(self) -> None:
        wrapped: Any = self.model
        if self.comm_hook is not None:
            wrapped.register_comm_hook(*self.comm_hook)

    def on_exception(self, exception: BaseException) -> None:
        """Wait for nothing that may need a lost peer."""
        self._compiling.close()
        super().on_exception(exception)
        assert self.lightning_module is not None
        skip_teardown(self.lightning_module.trainer)


def has_bucket_copies(settings: Mapping[str, Any], accumulation: int) -> bool:
    """Return whether DDP's buckets are a second copy of a rank's gradients.

    Args:
        settings: arguments of `DistributedDataParallel`.
        accumulation: micro-batches of a rank in one step.
    """
    if not settings.get("gradient_as_bucket_view", True):
        return True
    return accumulation > 1 and bool(settings.get("find_unused_parameters", False))


def refuse_unsynchronized(model: nn.Module | None, device: torch.device, world_size: int) -> None:
    """Raise a `UserError` if torch can't synchronize a BatchNorm over these ranks."""
    if world_size == 1 or device.type == "cuda" or model is None:
        return
    synchronized = any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules())
    rule = (
        f"needs GPUs, but this run uses {device.type}: torch synchronizes BatchNorm only there; "
        "set it to false"
    )
    check("trainer.sync_batchnorm", synchronized, not synchronized, rule)


def first_step_of(wrapped: DistributedDataParallel, trainer: Trainer) -> "FirstStep | None":
    """Return what arranges DDP's buckets in the first step; None if there is no need.

    DDP arranges its buckets after the first step of a process, in the order in which gradients
    arrived. This decides the order of reduction over three or more ranks: a restarted run would sum
    in another order.

    It also decides where a step finds its gradients. DDP multiplies one that it copies into a
    bucket by 1 / ranks, and divides one that is already there by their number. These round
    differently unless the number is a power of two, so all steps must do the same.
    """
    size = trainer.world_size
    is_static = wrapped.static_graph
    accumulates = trainer.accumulate_grad_batches > 1
    arranges_once = is_static or not wrapped.find_unused_parameters
    # A parameter that some steps don't use would have a gradient of zero in a bucket, and its
    # moments would change it: the optimizer must find none instead.
    keeps = accumulates and wrapped.gradient_as_bucket_view and not wrapped.find_unused_parameters
    if not arranges_once or not (size > 2 or keeps):
        needs_exchange = is_static and accumulates
        return FirstStep(wrapped, passes=0, keeps=False) if needs_exchange else None
    passes = 1
    if is_static and not accumulates:
        passes += 1  # its first backward only notes how often each parameter is used
    if keeps and size & (size - 1):
        passes += 1  # which divides what is already in the buckets
    return FirstStep(wrapped, passes, keeps)


class FirstStep:
    """Exchanges the gradients of a process's first step again, once DDP has its final buckets.

    The owner's code runs once. A function that only hands over the gradients of this rank takes
    the place of the model in further passes through DDP.

    Args:
        wrapped: the module in DDP.
        passes: how many to make.
        keeps: whether gradients stay in the buckets afterward.
    """

    def __init__(self, wrapped: DistributedDataParallel, passes: int, keeps: bool) -> None:
        self._wrapped = wrapped
        self._passes = passes
        self.keeps = keeps
        self._exchanges = 0
        self._weights = [weight for weight in wrapped.module.parameters() if weight.requires_grad]
        self._local: dict[nn.Parameter, Tensor] = {}  # in the order of arrival
        self._repeats = False  # whether a gradient arrived in several parts
        self._handles: list[Any] = []

    def needs_exchange(self) -> bool:
        """Return whether the next backward must have an exchange, though it isn't the last."""
        return bool(self._wrapped.static_graph) and self._exchanges == 0

    def needs_gradients(self, is_last: bool) -> bool:
        """Return whether the gradients of the next backward are needed as they were before it."""
        return self._passes > 0 if is_last else self.needs_exchange()

    def watch(self) -> None:
        """Keep the gradients of the next backward as they are before the exchange."""
        self._exchanges += 1
        self._local = {}
        for weight in self._weights:
            self._handles.append(weight.register_post_accumulate_grad_hook(self._keep))

    def _keep(self, weight: Any) -> None:
        self._repeats |= weight in self._local
        self._local[weight] = weight.grad.detach().clone()

    def unwatch(self) -> None:
        """Keep no more gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def restore(self) -> None:
        """Undo the exchange: further micro-batches are added."""
        for weight, gradient in self._local.items():
            weight.grad = gradient
        self._local = {}

    def end(self, compress: Callable[[], None]) -> list[tuple[nn.Parameter, Tensor]]:
        """Replace the gradients with those of the final buckets; return the kept ones.

        Args:
            compress: registers the user's way to exchange gradients, whose state the passes before
                the last would change.
        """
        if self._repeats and self._wrapped.static_graph:
            self._passes = 0  # DDP would wait for all parts; only the first step rounds differently
        for number in reversed(range(self._passes)):
            places = [weight.grad for weight in self._weights]
            self._free()
            if number == 0:
                compress()
                if self.keeps and self._passes > 1:
                    self._fill(places)
            self._exchange()
        if self._passes == 0:
            compress()
        self._local = {}
        kept = [
            (weight, weight.grad)
            for weight in self._weights
            if weight.grad is not None and not weight.grad.is_sparse
        ]
        if not self.keeps or self._passes == 0 or len(kept) < len(self._weights):
            return []
        return kept

    def _free(self) -> None:
        for weight in self._weights:
            weight.grad = None

    def _fill(self, places: list[Tensor | None]) -> None:
        """Let gradients be zeros in the buckets."""
        for weight, place in zip(self._weights, places, strict=True):
            if place is not None:
                weight.grad = place.zero_()

    def _exchange(self) -> None:
        """Hand the gradients of this rank to DDP, in the order in which they arrived."""
        wrapped: Any = self._wrapped
        module, broadcasts = wrapped.module, wrapped.broadcast_buffers
        wrapped.module, wrapped.broadcast_buffers = Gradients(self._local), False
        try:
            end = wrapped(torch.zeros((), device=self._weights[0].device, requires_grad=True))
        finally:
            wrapped.module, wrapped.broadcast_buffers = module, broadcasts
        with without_hooks(self._weights):
            end.backward()


class Gradients(nn.Module):
    """Takes the place of a module in DDP: its backward yields known gradients.

    Args:
        of_weights: the gradients, in the order in which they arrive.
    """

    def __init__(self, of_weights: dict[nn.Parameter, Tensor]) -> None:
        super().__init__()
        self._of_weights = of_weights

    def forward(self, start: Tensor) -> Tensor:
        """Return a scalar, whose backward begins with the first weight."""
        chain = start
        for weight, gradient in reversed(self._of_weights.items()):
            chain = HandOver.apply(chain, weight, gradient)  # type: ignore[no-untyped-call]
        return chain


class HandOver(torch.autograd.Function):
    """Gives a weight, in backward, a gradient that is known already."""

    @staticmethod
    def forward(ctx: Any, chain: Tensor, _weight: Tensor, gradient: Tensor) -> Tensor:
        """Return `chain`, whose backward comes after this one."""
        ctx.gradient = gradient
        return chain.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Return the gradients of `chain` and of the weight."""
        return gradient, ctx.gradient, None


def comm_hook_of(name: str) -> CommHook | None:
    """Return torch's hook: fp16, bf16, or powersgd; None for `none`."""
    if name == "none":
        return None
    # Importing these takes a tenth of a second, and few runs compress gradients.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":  # low-rank approximations (Vogels et al. 2019)
        state = powerSGD_hook.PowerSGDState(process_group=None)
        return state, powerSGD_hook.powerSGD_hook
    hooks = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return None, hooks[name]
