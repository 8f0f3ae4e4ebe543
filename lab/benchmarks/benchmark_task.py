"""What every loop of `benchmark.py` does: its task, and the times that it writes.

All use random tokens, optimizer steps of `Task.shape["steps"]` micro-batches, AdamW with
clipping, and a time for each step that ends when the device has finished it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

WARMUP = 4  # steps that do not count; compilation happens in them
BURST = 4  # steps that alternate if two loops share a process
TOY_BURST = 50

# Layers, heads, width, T tokens, B samples of a micro-batch, vocabulary, micro-batches of a step.
NANO = {"n_layer": 4, "n_head": 4, "n_embd": 128, "T": 64, "B": 12, "vocab": 256, "steps": 1}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "T": 1024, "vocab": 50257, "steps": 8}

# S is nanoGPT's documented recipe for a CPU, without biases; in M, the vocabulary matters; gpt2 is
# what one GPU trains, with 524,288 tokens a step. Loops compare models of this shape with AdamW.
# Of quickstart, our own recipe, only ours has the model; with quickstart_adamw, it also has AdamW.
MODELS = {
    "toy": {"n_layer": 1, "n_head": 1, "n_embd": 16, "T": 8, "B": 4, "vocab": 256, "steps": 1},
    "S": {**NANO, "bias": False},
    "quickstart": {**NANO, "bias": False},
    "quickstart_adamw": {**NANO, "bias": False},
    "M": {"n_layer": 6, "n_head": 8, "n_embd": 512, "T": 127, "B": 8, "vocab": 50257, "steps": 1},
    "gpt2": {**GPT2, "B": 32},  # with 64, our loss is computed in chunks on an H100
    "gpt2_xl": {**GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600, "B": 16},
}
RECIPES = {
    "quickstart": ("model=modern_nano", "optim=muon"),
    "quickstart_adamw": ("model=modern_nano", "optim=adamw"),
}


@dataclass
class Task:
    """The work of every loop, and where it runs."""

    model: str
    precision: str
    device: str
    ranks: int
    steps: int
    compile: bool

    @property
    def shape(self) -> dict[str, int]:
        """Layers, heads, width, T tokens, B samples over all ranks, vocabulary, micro-steps."""
        return MODELS[self.model]

    @property
    def bias(self) -> bool:
        """Whether linear layers and norms have biases, as in GPT-2."""
        return bool(self.shape.get("bias", True))

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step over all ranks."""
        return self.shape["B"] * self.shape["T"] * self.shape["steps"]

    @property
    def micro_size(self) -> int:
        """Samples per micro-batch on one rank."""
        return self.shape["B"] // self.ranks

    @property
    def burst(self) -> int:
        """Consecutive steps of each loop if two loops share a process."""
        return TOY_BURST if self.model == "toy" else BURST

    def autocast(self) -> Any:
        """Return the context of the forward pass."""
        if self.precision == "bf16-mixed":
            return torch.autocast(self.device, torch.bfloat16)
        return contextlib.nullcontext()

    def overrides(self, folder: Path, paired: bool) -> list[str]:
        """Return the arguments after `lockstep-gpt train`."""
        shape = self.shape
        counted = self.steps
        if paired:  # whole bursts
            counted = math.ceil(self.steps / self.burst) * self.burst
        steps = WARMUP + counted + 1
        gpt2 = ("model=gpt2", "optim=adamw", f"model.bias={str(self.bias).lower()}")
        clock = "Pair" if paired else "Clock"
        return [
            *RECIPES.get(self.model, gpt2),
            f"model.block_size={shape['T']}",
            *(f"model.{name}={shape[name]}" for name in ("n_layer", "n_head", "n_embd")),
            "data=synthetic",
            f"data.source.vocab_size={shape['vocab']}",
            f"data.root={folder}/data",
            "val_tokens=1",
            f"batch.micro_size={self.micro_size}",
            f"batch.global_size={shape['B'] * shape['steps']}",
            f"trainer={'gpu' if self.device == 'cuda' else 'cpu'}",
            f"trainer.devices={self.ranks}",
            f"precision={self.precision}",
            f"compile={str(self.compile).lower()}",
            f"max_steps={steps}",
            f"val_every={steps}",
            "log_every=50",
            "schedule.warmup=1",
            f"run_dir={folder}/run",
            "logger=none",
            f"+callbacks.clock._target_=benchmarks.loops.{clock}",
        ]


def load_task() -> tuple[Task, Path]:
    """Return the task, and the path for its result."""
    content = json.loads(os.environ["BENCHMARK_TASK"])
    return Task(**{name: content[name] for name in Task.__dataclass_fields__}), Path(content["out"])


def step_seconds(step: Callable[[], Any], device: str) -> float:
    """Return the seconds of one step."""
    begun = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begun


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def write_result(out: Path, seconds: list[float], started: float, **more: Any) -> None:
    """Write the median step after the warmup, the time before it, and the peak memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**20
    counted = seconds[WARMUP:]
    result = {
        "step_seconds": statistics.median(counted),
        "step_seconds_all": counted,
        "start_seconds": time.perf_counter() - started - sum(counted),
        "peak_mb": peak,
        **more,
    }
    out.write_text(json.dumps(result))
