"""Private names of torch, each with the reason. Versions: torch 2.12 to 2.15."""

import copy
import importlib
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

P = ParamSpec("P")
R = TypeVar("R")

# The base class of all BatchNorm layers, also of SyncBatchNorm: torch has no public one.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm


def has_fast_bfloat16() -> bool:
    """Return whether this CPU's matrix products are fast in bfloat16; torch asks oneDNN itself."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def let_others_unscale(optimizer: torch.optim.Optimizer) -> None:
    """Let a loss scaler unscale the gradients before the step also of a fused optimizer.

    A fused kernel would do so itself, but after clipping; there is no public name for that.
    """
    fused: Any = optimizer
    if getattr(fused, "_step_supports_amp_scaling", False):
        fused._step_supports_amp_scaling = False


def compiled_for_each_shape(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, compiled in one piece for each combination of its arguments' shapes.

    torch gives up after 8 of them, and versions below 2.13 have no public name for more.
    """
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*arguments: P.args, **settings: P.kwargs) -> R:
        with torch._dynamo.config.patch(recompile_limit=256):
            return compiled(*arguments, **settings)

    return call


@contextmanager
def without_hooks(weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let gradients arrive in this context without the hooks of `weights`.

    These have seen the gradients. torch can only remove a hook with what registered it.
    """
    held: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for weight in weights:
        for hooks in (weight._backward_hooks, weight._post_accumulate_grad_hooks):
            if hooks:
                held.append((hooks, dict(hooks)))
                hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def shallow_copy(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module that shares its weights, and all children but the replaced ones.

    A copy shares the table of children, too, for which there is no public name.
    """
    copied = copy.copy(module)
    copied._modules = {**module._modules, **replaced}
    return copied


def empty_buckets(ddp: DistributedDataParallel) -> Sequence[Any]:
    """Return copies of DDP's gradient buckets, which it keeps private, filled with zeros."""
    return list(ddp.reducer._get_zeros_like_grad_buckets())


def compiling_one_graph() -> AbstractContextManager[Any]:
    """Return a context in which a compiled model under DDP stays one graph.

    torch cuts it at the borders of DDP's buckets, and has no public name for not doing so.
    """
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(optimize_ddp=False)
    return patch


def processes_of(agent: Any) -> Any:
    """Return what manages the processes of an elastic agent's ranks; None before they start."""
    return agent._pcontext


def handle_signals_with(handler: Any) -> None:
    """Let torch's agents install `handler` for signals when they start ranks.

    Theirs raises an exception at each signal, also while ranks save after the first one.
    """
    import torch.distributed.elastic.multiprocessing.api as multiprocessing

    multiprocessing._terminate_process_handler = handler


def limit_waits(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the longest wait of a group that torch made itself, such as a dimension of a mesh.

    It gives these its default, whatever that of all ranks is; only its Options, which differ by
    backend, could say another one.
    """
    if dist.get_backend(group) in ("nccl", "gloo"):  # torch warns of others
        # The public function came with torch 2.14, where the private one warns.
        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_timeout(timeout, group)


def free_ports_at(address: str) -> None:
    """Let torch's rendezvous look for a free port at an address, not at the name localhost.

    A machine may have no such name, or only an IPv6 address for it, at which no rank listens.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.api")

    def free_port() -> int:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])

    rendezvous.get_free_port = free_port


def name_callers_without_source() -> None:
    """Let torch's rendezvous find the names of its callers without reading their source files.

    It does so in every call for its log, which takes half of an agent's time.
    """
    import torch.distributed.elastic.rendezvous.dynamic_rendezvous as rendezvous

    rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
