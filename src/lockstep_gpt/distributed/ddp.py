"""DDP: every rank has the whole model, and gradients are averaged while backward runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import Any

from lightning.pytorch import strategies
from torch import Tensor, nn

from lockstep_gpt.lightning_patches import skip_teardown
from lockstep_gpt.torch_patches import compiling_one_graph


class DDPStrategy(strategies.DDPStrategy):
    """Lightning's, without slow broadcasts or waiting for dead ranks.

    Args:
        split_graph: whether torch cuts a compiled model at the borders of buckets, so that they are
            sent while backward goes on; `auto`: only where that hides more than it costs.
        arguments: Lightning's, and those of torch's `DistributedDataParallel`.
    """

    def __init__(self, split_graph: bool | str = True, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.split_graph = split_graph
        self._compiling = ExitStack()

    def setup(self, trainer: Any) -> None:
        """Decide first whether the model is compiled in one piece."""
        self._compiling.enter_context(self.compiling(trainer.accumulate_grad_batches))
        super().setup(trainer)

    def teardown(self) -> None:
        """Restore torch's setting."""
        self._compiling.close()
        super().teardown()

    def compiling(self, micro_batches: int) -> AbstractContextManager[Any]:
        """Return a context in which a model for steps of so many micro-batches is compiled."""
        if self.splits_graph(micro_batches):
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

    def configure_ddp(self) -> None:
        """Broadcast buffers in each step only if some are saved state, like BatchNorm's."""
        model = self.model
        assert model is not None
        super().configure_ddp()
        if model.state_dict().keys().isdisjoint(name for name, _ in model.named_buffers()):
            wrapped: Any = self.model
            wrapped.broadcast_buffers = False  # the argument has two names, by torch version

    def on_exception(self, exception: BaseException) -> None:
        """Wait for nothing that may need a lost peer."""
        self._compiling.close()
        assert self.lightning_module is not None
        skip_teardown(self.lightning_module.trainer)


class CompressedDDP(DDPStrategy):
    """DDP that sends gradients in fewer bytes; Lightning would register the hook only on GPUs.

    Args:
        hook: of torch, which sends one bucket of gradients.
        state: its first argument.
        arguments: of `DDPStrategy`.
    """

    def __init__(self, hook: Callable[..., Any], state: Any = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hook = hook
        self.state = state

    def configure_ddp(self) -> None:
        """Register the hook."""
        super().configure_ddp()
        wrapped: Any = self.model
        wrapped.register_comm_hook(self.state, self.hook)


def can_keep_gradients(strategy: strategies.Strategy) -> bool:
    """Return whether gradients may stay in DDP's buckets from step to step, as zeros in between.

    A parameter that some steps don't use then has a gradient of zero in them, and its moments would
    change it: with `find_unused_parameters`, the optimizer must find none instead.
    """
    ddp = strategy.model
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        return False
    return ddp.gradient_as_bucket_view and not ddp.find_unused_parameters


def arrange_buckets(
    strategy: strategies.Strategy, model: nn.Module, batch: tuple[Tensor, Tensor], keep: bool
) -> bool:
    """Make DDP arrange its buckets now instead of after the first step.

    DDP does so once, in the order in which gradients arrived. This decides the order of reduction
    over three or more ranks: a restarted run would sum in another order.

    It also decides where the first step finds its gradients. DDP multiplies one that it copies into
    a bucket by 1 / ranks, and divides one that is already there by their number. These round
    differently unless the number is a power of two, so all steps must do the same.

    And with `static_graph`, torch fails if the first backward of all is one without an all-reduce.

    Args:
        strategy: of the Trainer; one that isn't DDP has no buckets.
        model: its buffers, such as BatchNorm's statistics, are as before afterward.
        batch: tokens and targets, each (B, T); their values don't matter.
        keep: whether to leave zeros in the buckets as gradients, instead of none.

    Returns:
        Whether gradients are in the buckets: no, if the model left a parameter unused.
    """
    if not isinstance(strategy, strategies.DDPStrategy):
        return False
    buffers = [buffer.clone() for buffer in model.buffers()]
    gradients = _gradients_of(strategy, model, batch)
    is_kept = keep and None not in gradients
    if is_kept:
        # DDP allocates its final buckets in this forward: without gradients, only once.
        gradients = _gradients_of(strategy, model, batch)
        for gradient in gradients:
            gradient.zero_()
    else:
        model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return is_kept


def _gradients_of(
    strategy: strategies.Strategy, model: nn.Module, batch: tuple[Tensor, Tensor]
) -> list[Any]:
    """Run forward and backward; return the gradient, or None, of each trained parameter."""
    model.zero_grad()
    loss: Any = strategy.training_step(batch, 0)
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.requires_grad]


def build_ddp(
    process_group_backend: str | None, timeout_seconds: float, comm_hook: str, **arguments: Any
) -> DDPStrategy:
    """Return the strategy; `DDPStrategy` and torch's `DistributedDataParallel` get the rest."""
    arguments |= {
        "process_group_backend": process_group_backend,
        "timeout": timedelta(seconds=timeout_seconds),
    }
    if comm_hook == "none":
        return DDPStrategy(**arguments)
    # Importing these takes a tenth of a second, and few runs compress gradients.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if comm_hook == "powersgd":  # low-rank approximations (Vogels et al. 2019)
        state = powerSGD_hook.PowerSGDState(process_group=None)
        return CompressedDDP(powerSGD_hook.powerSGD_hook, state, **arguments)
    hooks = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
    }
    return CompressedDDP(hooks[comm_hook], **arguments)
