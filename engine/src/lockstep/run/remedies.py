"""Failures that a setting of ours remedies: their causes and remedies, in two lines.

torch, NCCL, and the system report what broke, but don't know our settings.
"""

import re
import signal

OUT_OF_MEMORY = r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
COLLECTIVE_TIMEOUT = r"collective operation timeout|Timed out waiting \d+ ?ms|NCCL watchdog"
LESS_MEMORY = (
    "lower batch.micro_size, which changes nothing else; or take "
    "model.activation_checkpointing=true, precision=bf16-mixed, a smaller model, or devices with "
    "more memory"
)


def explain(text: str) -> str:
    """Return cause and remedy of a failure whose message is in `text`; empty if unknown."""
    if re.search(OUT_OF_MEMORY, text):
        return _lines("one micro-batch needs more memory than a device has", LESS_MEMORY)
    if re.search(COLLECTIVE_TIMEOUT, text):
        return _lines(
            "a rank joined an all-reduce late or never: it hung, died on another machine, or was "
            "in code that only some ranks run, such as a barrier below "
            "`if trainer.is_global_zero`",
            "see the other ranks' files in ranks/: the rank without this error is the slow one. "
            "guard.stall_after=60 shows where each rank is; strategy.timeout_seconds sets the wait",
        )
    if unknown := re.search(r"Early stopping conditioned on metric `(\S+)` which is not", text):
        return _lines(
            f"EarlyStopping monitors {unknown[1]}, which nothing logs",
            "set its monitor to a metric in metrics.csv, also to continue this run, such as "
            "callbacks.NAME.monitor=val/loss",
        )
    return ""


def explain_death(signum: int, log: str) -> str:
    """Return cause and remedy of a rank's death, from its log or its signal (0: none)."""
    explanation = explain(log)
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
