"""The environment variables that libraries read: a second command line, which nobody checks.

For each there is one decision:

- refused, because it would change the experiment, and config.yaml would not show it:
  `PL_TRAINER_*`; or would end the ranks: interfaces of gloo and NCCL that this machine lacks, and
  a debugging level with which torch crashes;
- dropped, because it is of another program: `DROPPED`, a backend of matplotlib that is not here,
  and a level of logging that Python doesn't know;
- shown in the receipt and in environment.json, because it can change the last bits of a result, or
  its speed: `SHOWN`;
- left to its library. Where a setting has the same meaning, the setting wins if it was set.

`lockstep.launch.launcher` checks the variables of launchers, `lockstep.loggers.wandb_run` those of
wandb, and a project's `scripts/dev.py` those of pip.
"""

import logging
import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from importlib.metadata import entry_points
from importlib.util import find_spec

from lockstep.errors import UserError
from lockstep.settings import check

GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"
DEBUG = "TORCH_DISTRIBUTED_DEBUG"
TRAINER = "PL_TRAINER_"  # Lightning takes arguments that its Trainer isn't given from these
# Lightning's `seed_everything` leaves these to the processes that a program starts.
DROPPED = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
PLOTS = "MPLBACKEND"  # a notebook sets its own for all commands that it starts
LEVEL = "LOGLEVEL"  # torch's agent of ranks reads it, and ends if it is `debug` or `10`
MODULE = "module://"  # a backend outside matplotlib
BACKEND = re.compile(  # of matplotlib itself
    "(gtk[34]|qt5?|tk|wx|web|nb)?agg|(gtk[34]|qt5?|tk|wx)?cairo|"
    "pdf|pgf|ps|svg|template|macosx|notebook|wx"
)
# They choose algorithms and precision, or what torch compiles.
SHOWN = re.compile(
    r"NCCL_(?!DEBUG|SOCKET_IFNAME)|TORCHINDUCTOR_(?!CACHE_DIR|COMPILE_THREADS)|TORCHDYNAMO_|TORCH_COMPILE|"
    r"(ONEDNN|DNNL)_|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS|OPENBLAS_CORETYPE|ATEN_CPU_CAPABILITY|"
    r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32|CUDNN_|CUDA_LAUNCH_BLOCKING|"
    r"TORCH_CUDNN|TORCH_BLAS|TORCH_LINALG|PYTORCH_TUNABLEOP|TORCH_DISTRIBUTED_DEBUG"
)


def settle(variables: MutableMapping[str, str] = os.environ) -> None:
    """Refuse and drop what would act on a run unseen; before any library reads it.

    Raises:
        UserError: a variable would set an argument of Lightning's Trainer.
    """
    set_here = sorted(name for name in variables if name.startswith(TRAINER) and variables[name])
    if set_here:
        name, value = set_here[0], variables[set_here[0]]
        argument = name.removeprefix(TRAINER).lower()
        raise UserError(
            f"{name}={value} would set an argument of Lightning's Trainer, and the run's "
            f"configuration would not show it; write trainer.{argument}={value} (with a + before "
            f"it if your configuration lacks it), and: unset {' '.join(set_here)}"
        )
    for name in DROPPED:
        variables.pop(name, None)
    if PLOTS in variables and not is_backend(variables[PLOTS]):
        del variables[PLOTS]
    if LEVEL in variables and variables[LEVEL] not in logging.getLevelNamesMapping():
        del variables[LEVEL]


def is_backend(name: str) -> bool:
    """Return whether matplotlib, if it is installed here, could draw with this backend."""
    if name.startswith(MODULE):
        try:
            return find_spec(name.removeprefix(MODULE)) is not None
        except (ImportError, ValueError):
            return False
    installed = {point.name for point in entry_points(group="matplotlib.backend")}
    return bool(BACKEND.fullmatch(name.lower())) or name.lower() in installed


def shown(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that can change bits or speed of a run, sorted by name.

    Example:
        >>> shown({"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "HOME": "/root"})
        {'NCCL_ALGO': 'Ring'}
    """
    return {name: variables[name] for name in sorted(variables) if SHOWN.match(name)}


def refuse_absent_interfaces(accelerator: str, world_size: int) -> None:
    """Raise a `UserError` if these ranks would connect through an interface that isn't there."""
    if world_size > 1:
        refuse_absent_interface(GLOO, os.environ.get(GLOO, ""))
        if accelerator == "cuda":
            refuse_absent_interface(NCCL, os.environ.get(NCCL, ""))


def refuse_crash(accelerator: str, world_size: int) -> None:
    """Raise a `UserError` for a variable with which DDP over gloo dies (torch 2.13: SIGSEGV)."""
    value = os.environ.get(DEBUG, "")
    rule = f"ends ranks on CPUs with SIGSEGV, in torch's own code; run: export {DEBUG}=INFO"
    is_fatal = value.upper() == "DETAIL" and accelerator == "cpu" and world_size > 1
    check(DEBUG, value, not is_fatal, rule)


def refuse_absent_interface(variable: str, names: str) -> None:
    """Raise a `UserError` if a variable of gloo or NCCL names interfaces that aren't there.

    gloo needs each of its names, exactly. NCCL needs one, and takes beginnings of names; after `=`
    whole names; after `^` those to leave out, which may be absent.
    """
    if not names or (variable == NCCL and names.startswith("^")):
        return
    present = {name for _, name in socket.if_nameindex()}
    # `eth0:1` is a second address of eth0 to gloo; to NCCL, a port follows the colon.
    wanted = [name.partition(":")[0] for name in names.removeprefix("=").split(",")]
    if variable == GLOO:
        are_present = present.issuperset(wanted)
    elif names.startswith("="):
        are_present = not present.isdisjoint(wanted)
    else:
        are_present = any(name.startswith(tuple(wanted)) for name in present)
    rule = (
        f"is not a network interface of this machine, which has {', '.join(sorted(present))}; set "
        f"one of them, or: unset {variable}"
    )
    check(variable, names, are_present, rule)
