"""Known failures: what their messages mean, and what to do.

torch, NCCL, and the system report what broke. This adds the cause, and the setting that helps.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from lockstep_gpt.config import Config

COLLECTIVE_TIMEOUT = r"collective operation timeout|Timed out waiting \d+ ?ms|NCCL watchdog"
MOST_NAMES = 8  # of unused parameters in a remedy


@dataclass(frozen=True)
class Scene:
    """The context of a failure.

    Args:
        config: the run's configuration.
        world_size: total number of ranks.
        unused: names of parameters that the last backward did not reach.
    """

    config: Config
    world_size: int
    unused: Sequence[str] = ()


Remedy = str | Callable[[str, Scene], str]


@dataclass(frozen=True)
class Entry:
    """One known failure.

    Args:
        pattern: regular expression that matches its message.
        cause: what it means.
        remedy: what to do, or a function that returns it.
    """

    pattern: str
    cause: str
    remedy: Remedy


def suggest_less_memory(_text: str, scene: Scene) -> str:
    """Suggest the next smaller micro-batch at the same global batch, and other memory savers."""
    batch = scene.config.batch
    suggestions = []
    share = (batch.global_size or 0) // scene.world_size  # samples of a device in one step
    micro = batch.micro_size or share
    if share:
        divisors = [size for size in range(1, micro) if share % size == 0]
        if divisors:
            suggestions.append(
                f"batch.micro_size={divisors[-1]} ({share // divisors[-1]} micro-batches per step; "
                "nothing else changes)"
            )
    elif micro > 1:
        suggestions.append(f"batch.micro_size={micro // 2}")
    if not scene.config.model.activation_checkpointing:
        suggestions.append("model.activation_checkpointing=true")
    if scene.config.precision == "32-true":
        suggestions.append("precision=bf16-mixed")
    return "; ".join(suggestions) or "a smaller model, or devices with more memory"


def parameters_without_gradient(text: str, model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters whose indices DDP's message `text` lists."""
    listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    if not listed:
        return []
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    return [trained[int(index)] for index in listed.group(1).split()]


def name_unused_parameters(_text: str, scene: Scene) -> str:
    """Name the parameters that are not used in the loss."""
    names = ", ".join(scene.unused[:MOST_NAMES])
    if len(scene.unused) > MOST_NAMES:
        names += f" and {len(scene.unused) - MOST_NAMES} more"
    which = f" ({names})" if names else ""
    return f"use every parameter in the loss{which}, or set strategy.find_unused_parameters=true"


def name_logged_metrics(text: str, _scene: Scene) -> str:
    """Name the metrics that Lightning lists in its message, and the one that is not among them."""
    wanted = re.search(r"(?:monitor=|on metric )['`]([^'`]+)", text)
    listed = re.search(r"(?:metrics: \[|following: )([^\]\n]+)", text)
    name = wanted[1] if wanted else "its monitor"
    logged = ", ".join(re.findall(r"[\w/.-]+", listed[1])) if listed else "those in metrics.csv"
    return f"replace {name} with one of {logged}; or log it before the callback needs it"


ENTRIES = [
    Entry(
        r"could not find the monitored key|Early stopping conditioned on metric",
        "a callback monitors a metric that nothing logs",
        name_logged_metrics,
    ),
    Entry(
        r"CUDA out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED|out of memory",
        "one micro-batch needs more memory than a device has",
        suggest_less_memory,
    ),
    Entry(
        r"/dev/shm/nccl",
        "/dev/shm is too small: the GPUs of a machine communicate through it",
        "enlarge it: docker run --ipc=host or --shm-size=8g; on Kubernetes, an emptyDir with "
        "medium Memory at /dev/shm. NCCL_SHM_DISABLE=1 avoids it, but is slower",
    ),
    Entry(
        r"Bus error|SemLock|DataLoader timed out|out of shared memory|"
        r"unable to (?:open|allocate) shared memory|</torch_\d|/dev/shm/(?:torch_|sem\.|psm_)",
        "workers of the data loader cannot hand over batches, most often because /dev/shm is full",
        "use fewer workers, or enlarge it: docker run --ipc=host or --shm-size=8g; on Kubernetes, "
        "an emptyDir with medium Memory at /dev/shm",
    ),
    Entry(
        r"EADDRINUSE|[Aa]ddress already in use",
        "another process, perhaps of a run that has not ended, uses the port of the rendezvous",
        "another port in launch.rdzv_endpoint or MASTER_PORT; `ss -ltnp` shows which process "
        "uses it",
    ),
    Entry(
        r"did not receive grad|not used in producing the loss|Expected to have finished reduction",
        "parts of the model do not affect the loss, so DDP waits for their gradients",
        name_unused_parameters,
    ),
    Entry(
        r"appears not to match sizes of the same param|expects same model across all ranks|"
        r"Detected mismatch between collectives|op\.preamble\.length <= op\.nbytes",
        "ranks have models, or send tensors, of different shapes",
        "use the same code, settings, and packages on every machine; `python -m "
        "torch.utils.collect_env` on each shows versions",
    ),
    Entry(
        r"RendezvousTimeoutError|waiting for clients|client socket has timed out|"
        r"client socket has failed to connect",
        "not all ranks reached the rendezvous in time",
        "start the same command on every machine, and check that each can resolve the first "
        "one's name and reach its port. launch.join_seconds sets how long they wait",
    ),
    Entry(
        r"Duplicate GPU detected|ncclInvalidUsage",
        "two ranks use the same GPU, or NCCL was called with invalid arguments",
        "one GPU for each rank: at most as many trainer.devices as CUDA_VISIBLE_DEVICES lists, "
        "and LOCAL_RANK from 0 on each machine; NCCL_DEBUG=WARN shows more",
    ),
    Entry(
        r"an illegal memory access was encountered",
        "a kernel read or wrote memory outside its tensors",
        "CUDA_LAUNCH_BLOCKING=1 shows where; compile=false shows whether a compiled one did it",
    ),
    Entry(
        r"ncclUnhandledCudaError|unhandled cuda error",
        "a CUDA call failed inside NCCL, most often because of the driver or a GPU in a bad state",
        "NCCL_DEBUG=WARN shows which call; `nvidia-smi` and `dmesg` show the GPUs' state; "
        "NCCL_P2P_DISABLE=1 turns off direct access between them",
    ),
    Entry(
        r"only supported with GPUs|[Nn]o backend type associated with device type cpu|"
        r"Tensors must be CUDA and dense",
        "NCCL was given a CPU tensor",
        "move it to the module's device before it is sent, or set "
        "strategy.process_group_backend=gloo",
    ),
    Entry(
        r"ncclSystemError|ncclRemoteError|unhandled system error|ncclInternalError|socketStart",
        "NCCL could not set up or keep a connection",
        "NCCL_DEBUG=INFO shows which; NCCL_SOCKET_IFNAME sets the interface; NCCL_IB_DISABLE=1 "
        "turns off InfiniBand. All ranks need the same GPU model, driver, and NCCL",
    ),
    Entry(
        COLLECTIVE_TIMEOUT,
        "a rank joined an all-reduce late or never: it hung, died on another machine, or was in "
        "code that only some ranks run, such as a barrier below `if trainer.is_global_zero`",
        "see the other ranks' files in ranks/: the rank without this error is the slow one. "
        "guard.stall_after=60 shows where each rank is; strategy.timeout_seconds sets the wait",
    ),
    Entry(
        r"no kernel image is available|CUDA driver version is insufficient|driver .* too old",
        "this build of torch does not support the GPU or its driver",
        "install a build for the CUDA version that `nvidia-smi` shows: https://pytorch.org",
    ),
    Entry(
        r"device-side assert triggered",
        "a kernel found an index out of range: most often a token beyond the vocabulary",
        "CUDA_LAUNCH_BLOCKING=1 shows where; `prepare --verify` checks the tokens",
    ),
    Entry(
        r"uncorrectable ECC|fallen off the bus|Xid|unspecified launch failure",
        "a GPU, its memory, or its link is broken",
        "continue without that machine (resume=auto); `dmesg` and `nvidia-smi -q` there show more",
    ),
    Entry(
        r"Too many open files",
        "the process may not open more files",
        "run `ulimit -n 65536` before the command, or use fewer workers",
    ),
]
# The most common causes of signals that nobody sent on purpose.
SIGNALS: dict[int, Entry] = {
    signal.SIGKILL: Entry(
        "",
        "killed from outside, most often by the system when memory ran out",
        "`dmesg | grep -i oom` shows it; then use fewer ranks, or a smaller batch.micro_size",
    ),
    signal.SIGBUS: next(entry for entry in ENTRIES if "Bus error" in entry.pattern),
    signal.SIGABRT: Entry(
        "",
        "it aborted: most often NCCL's watchdog did it, after an NCCL error or a timeout",
        "its last lines, on the terminal or in ranks/, say why; guard.stall_after=60 shows where "
        "each rank is before a timeout",
    ),
    signal.SIGSEGV: Entry(
        "",
        "a crash in compiled code",
        "PYTHONFAULTHANDLER=1 shows where in Python; most often, two installed builds do not match",
    ),
}


def explain(text: str, scene: Scene) -> str:
    """Return a failure's cause and remedy in two lines, or an empty string if it is unknown."""
    for entry in ENTRIES:
        if re.search(entry.pattern, text):
            return _lines(entry, text, scene)
    return ""


def explain_error(
    text: str, config: Config, world_size: int, model: nn.Module | None = None
) -> str:
    """Return cause and remedy of the error that stopped a rank, or "" if it is unknown.

    Args:
        text: message of the error.
        config: the run's configuration.
        world_size: total number of ranks.
        model: the model that failed.
    """
    unused = parameters_without_gradient(text, model) if model else []
    return explain(text, Scene(config, world_size, unused))


def in_one_line(explanation: str) -> str:
    """Return cause and remedy in one line."""
    return re.sub(r"^(cause|remedy) +", "", explanation, flags=re.MULTILINE).replace("\n", "; ")


def explain_death(signum: int, log: str, scene: Scene) -> str:
    """Return cause and remedy from the log, else from the signal (0 if there was none)."""
    explanation = explain(log, scene)
    if not explanation and signum in SIGNALS:
        return _lines(SIGNALS[signum], log, scene)
    return explanation


def _lines(entry: Entry, text: str, scene: Scene) -> str:
    remedy = entry.remedy if isinstance(entry.remedy, str) else entry.remedy(text, scene)
    return f"cause   {entry.cause}\nremedy  {remedy}"
