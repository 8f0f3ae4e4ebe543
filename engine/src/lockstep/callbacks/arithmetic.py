"""What a run's bits depend on besides its settings: processors, libraries, code, and ranks."""

import logging
import platform
from pathlib import Path
from typing import Any

import torch
from lightning import Callback

from lockstep.errors import UserError
from lockstep.ranks.ranks import from_each_rank
from lockstep.run.source_code import changes_since, file_hashes
from lockstep.versions import NUMERICS, VERSION

logger = logging.getLogger(__name__)


class Arithmetic(Callback):
    """Keeps, in each checkpoint, what computed the run from each step at which that changed.

    Args:
        force: whether a run may go on under another `lockstep.NUMERICS`, with other bits.
    """

    def __init__(self, force: bool = False) -> None:
        self.force = force
        self.history: dict[int, dict[str, Any]] = {}  # completed steps at a start -> facts

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Restore what computed earlier parts of the run.

        Raises:
            UserError: it was an engine with other numerics.
        """
        self.history = dict(checkpoint.get("arithmetic", {}))
        if self.history and not self.force:
            refuse_other_numerics([*self.history.values()][-1])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Add an entry, unless nothing has changed; say which of our files have."""
        facts = facts_of(pl_module.device, trainer)
        before = [*self.history.values()][-1] if self.history else {}
        changed = changes_since(before.get("code"))
        if changed and trainer.is_global_zero:
            logger.warning(
                "changed since the run last started: %s; from step %d on, the new code trains",
                changed,
                trainer.global_step,
            )
        if not self.history or [*self.history.values()][-1] != facts:
            self.history = {**self.history, trainer.global_step: facts}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Save it all."""
        checkpoint["arithmetic"] = self.history


def refuse_other_numerics(facts: dict[str, Any]) -> None:
    """Raise a `UserError` if an engine with other numerics computed the state with these facts."""
    numerics = facts.get("numerics")
    if numerics != NUMERICS:
        raise UserError(
            f"the state was computed by lockstep {facts.get('version')} with numerics {numerics}, "
            f"and lockstep {VERSION} has numerics {NUMERICS}, so the run would go on with other "
            "bits; install that version, or set resume_force=true"
        )


def facts_of(device: torch.device, trainer: Any) -> dict[str, Any]:
    """Return what computes on all ranks; every rank must call this."""
    return {
        "processor": "; ".join(sorted({*from_each_rank(processor_of(device))})),
        "torch": str(torch.__version__),  # a plain type, to be saved
        "version": VERSION,
        "numerics": NUMERICS,
        "code": file_hashes(),
        "threads": torch.get_num_threads(),
        "ranks": trainer.world_size,
        "strategy": type(trainer.strategy).__name__,
        "micro_batches": trainer.accumulate_grad_batches,  # of a rank in a step
    }


def processor_of(device: torch.device) -> str:
    """Return the name of a GPU, or of this machine's CPU with its instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = next(iter(names), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
