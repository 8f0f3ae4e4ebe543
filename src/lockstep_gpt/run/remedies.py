"""Failures that a setting of ours remedies: their causes and remedies, in two lines.

torch, NCCL, and the system report what broke, but don't know our settings.
"""

import re
import signal

from lockstep_gpt.config import Config

OUT_OF_MEMORY = r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
COLLECTIVE_TIMEOUT = r"collective operation timeout|Timed out waiting \d+ ?ms|NCCL watchdog"


def explain(text: str, config: Config, world_size: int) -> str:
    """Return a failure's cause and remedy, or an empty string if it is unknown.

    Args:
        text: the message, perhaps among others.
        config: the run's configuration.
        world_size: total number of ranks.
    """
    if re.search(OUT_OF_MEMORY, text):
        cause = "one micro-batch needs more memory than a device has"
        return _lines(cause, _less_memory(config, world_size))
    if re.search(COLLECTIVE_TIMEOUT, text):
        return _lines(
            "a rank joined an all-reduce late or never: it hung, died on another machine, or was "
            "in code that only some ranks run, such as a barrier below "
            "`if trainer.is_global_zero`",
            "see the other ranks' files in ranks/: the rank without this error is the slow one. "
            "guard.stall_after=60 shows where each rank is; strategy.timeout_seconds sets the wait",
        )
    return ""


def explain_death(signum: int, log: str, config: Config, world_size: int) -> str:
    """Return cause and remedy of a rank's death, from its log or its signal (0: none)."""
    explanation = explain(log, config, world_size)
    if not explanation and signum == signal.SIGKILL:
        return _lines(
            "killed from outside, most often by the system when memory ran out",
            "`dmesg | grep -i oom` shows it; then use fewer ranks, or a smaller batch.micro_size",
        )
    return explanation


def in_one_line(explanation: str) -> str:
    """Return cause and remedy in one line."""
    return re.sub(r"^(cause|remedy) +", "", explanation, flags=re.MULTILINE).replace("\n", "; ")


def _lines(cause: str, remedy: str) -> str:
    return f"cause   {cause}\nremedy  {remedy}"


def _less_memory(config: Config, world_size: int) -> str:
    """Return the next smaller micro-batch at the same global batch, and other memory savers."""
    batch = config.batch
    suggestions = []
    share = (batch.global_size or 0) // world_size  # samples of a device in one step
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
    if not config.model.activation_checkpointing:
        suggestions.append("model.activation_checkpointing=true")
    if config.precision == "32-true":
        suggestions.append("precision=bf16-mixed")
    return "; ".join(suggestions) or "a smaller model, or devices with more memory"
