"""The loops that `benchmark.py` compares; each runs in its own process, on the same task."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.benchmark_task import (
    WARMUP,
    Task,
    load_task,
    step_seconds,
    synchronize,
    write_result,
)
from lightning import Callback
from torch import Tensor, nn


class PlainBlock(nn.Module):
    """A block made of torch's own modules."""

    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, bias=bias) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.out = nn.Linear(width, width, bias)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Refine (B, T, C)."""
        B, T, C = x.shape
        parts = self.qkv(self.norms[0](x)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, C))
        refined: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return refined


class PlainGPT(nn.Module):
    """A GPT-2 made of torch's own modules, with whole logits."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        shape = task.shape
        self.tokens = nn.Embedding(shape["vocab"], shape["n_embd"])
        self.positions = nn.Embedding(shape["T"], shape["n_embd"])
        self.blocks = nn.ModuleList(
            PlainBlock(shape["n_embd"], shape["n_head"], task.bias) for _ in range(shape["n_layer"])
        )
        self.norm = nn.LayerNorm(shape["n_embd"], bias=task.bias)
        self.head = nn.Linear(shape["n_embd"], shape["vocab"], bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of (B, T) tokens."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def tokens_of(task: Task) -> Tensor:
    """Return random tokens, enough for many batches."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(task.shape["vocab"], (1_000_000,), generator=generator)


def batches(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random windows in the usual way: read one by one, stacked, sent to the device."""
    data = tokens_of(task)
    T = task.shape["T"]
    while True:
        starts = torch.randint(len(data) - T - 1, (task.micro_size,)).tolist()
        x = torch.stack([data[i : i + T] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + T] for i in starts])
        if task.device == "cuda":
            x, y = (window.pin_memory().to("cuda", non_blocking=True) for window in (x, y))
        yield x, y


def raw(
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Iterator[Any],
    clip_norm: float | None = 1.0,
) -> Callable[[], Any]:
    """Return a function for one optimizer step of a hand-written loop."""
    wrapped = model
    if task.ranks > 1:
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def step() -> None:
        for micro in range(task.shape["steps"]):
            x, y = next(source)
            last = micro == task.shape["steps"] - 1 or task.ranks == 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                with task.autocast():
                    loss = wrapped(x, y)
                (loss / task.shape["steps"]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def join(task: Task) -> None:
    """Join the other ranks, and split the cores among them."""
    if task.ranks > 1:
        torch.distributed.init_process_group("nccl" if task.device == "cuda" else "gloo")
        if task.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.ranks))


def plain(task: Task) -> Callable[[], Any]:
    """Return a step with torch's own modules and settings."""
    join(task)
    model = PlainGPT(task).to(task.device)
    if task.compile:
        model.compile()
    return raw(task, model, torch.optim.AdamW(model.parameters(), lr=1e-4), batches(task))


def our_model(task: Task) -> nn.Module:
    """Return our GPT in the task's shape, on its device."""
    from lockstep_gpt.gpt import GPT

    shape = {name: task.shape[name] for name in ("n_layer", "n_head", "n_embd")}
    model = GPT(
        task.shape["vocab"],
        block_size=task.shape["T"],
        bias=task.bias,
        residual_dtype="bfloat16",
        **shape,
    )
    return model.to(task.device)


def best(task: Task, config: Any) -> Callable[[], Any]:
    """Return the leanest loop on the model and optimizer of `config`, with all batches ready."""
    from hydra.utils import instantiate
    from lockstep.building import build

    T = task.shape["T"]
    model = build(config.model, vocab_size=task.shape["vocab"]).to(task.device)
    if task.compile:
        model.compile(dynamic=False)
    windows = tokens_of(task).unfold(0, T + 1, T)[: 64 * task.micro_size].to(task.device)
    ready = [(window[:, :-1], window[:, 1:]) for window in windows.split(task.micro_size)]
    optimizer = instantiate(config.optim)(model.named_parameters(), lr=1e-4)
    return raw(task, model, optimizer, itertools.cycle(ready), config.clip_norm)


def accelerate(task: Task) -> Callable[[], Any]:
    """Return a step of our model in a loop with Accelerate."""
    from accelerate import Accelerator

    mixed = "bf16" if task.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(
        cpu=task.device == "cpu",
        mixed_precision=mixed,
        gradient_accumulation_steps=task.shape["steps"],
    )
    model = our_model(task)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), stock_loader(task)
    )
    source = iter(loader)

    def step() -> None:
        for _ in range(task.shape["steps"]):
            x, y = next(source)
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


def stock_loader(task: Task) -> torch.utils.data.DataLoader[Any]:
    """Return a DataLoader over windows that are read one by one."""
    data = tokens_of(task)
    T = task.shape["T"]
    count = task.micro_size * task.ranks * task.shape["steps"] * (WARMUP + task.steps + 2)
    starts = torch.randint(len(data) - T - 1, (count,)).tolist()
    windows = [(data[i : i + T], data[i + 1 : i + 1 + T]) for i in starts]
    return torch.utils.data.DataLoader(windows, batch_size=task.micro_size, shuffle=True)  # type: ignore[arg-type]


def nanogpt(task: Task) -> Callable[[], Any]:
    """Return a step of a nanoGPT checkout's model and optimizer, in a loop like its own."""
    sys.path.insert(0, os.environ["NANOGPT"])
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    join(task)
    shape = {name: task.shape[name] for name in ("n_layer", "n_head", "n_embd")}
    config = GPTConfig(
        block_size=task.shape["T"],
        vocab_size=task.shape["vocab"],
        dropout=0.0,
        bias=task.bias,
        **shape,
    )
    if task.shape["vocab"] == 50257 and task.device == "cuda":
        config.vocab_size = 50304  # its own training script rounds it up like this
    gpt = GPT(config).to(task.device)
    optimizer = gpt.configure_optimizers(0.1, 1e-4, (0.9, 0.95), task.device)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = torch.compile(gpt) if task.compile else gpt

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self.gpt(x, y)[1]

    if task.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    return raw(task, Loss(), optimizer, batches(task))


def litgpt(task: Task) -> Callable[[], Any]:
    """Return a step of litgpt's model of the same shape, in the same loop."""
    from litgpt import GPT, Config  # type: ignore[import-not-found]

    join(task)
    shape = {name: task.shape[name] for name in ("n_layer", "n_head", "n_embd")}
    gpt = GPT(
        Config(
            block_size=task.shape["T"],
            padded_vocab_size=-(-task.shape["vocab"] // 64) * 64,
            bias=task.bias,
            rotary_percentage=1.0,
            parallel_residual=False,
            **shape,
        )
    ).to(task.device)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = torch.compile(gpt) if task.compile else gpt

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.gpt(x).flatten(0, 1), y.flatten())

    return raw(task, Loss(), torch.optim.AdamW(gpt.parameters(), lr=1e-4), batches(task))


def stock(task: Task) -> None:
    """Train our model in a LightningModule that logs, with a default Trainer and a clock."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = our_model(task)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.model(*batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = lightning.Trainer(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        devices=task.ranks,
        strategy="ddp" if task.ranks > 1 else "auto",
        precision=task.precision,  # type: ignore[arg-type]
        max_steps=WARMUP + task.steps + 1,
        accumulate_grad_batches=task.shape["steps"],
        gradient_clip_val=1.0,
        callbacks=[Clock()],
    )
    trainer.fit(Module(), stock_loader(task))


class Clock(Callback):
    """Times every optimizer step of a Trainer, and writes the result at the end."""

    def __init__(self) -> None:
        self.task, self.out = load_task()
        self.started = time.perf_counter()
        self.seconds: list[float] = []
        self.last: float | None = None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """End the previous step's timing, and start the next."""
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches:
            return
        synchronize(self.task.device)
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.between(trainer)
        self.last = time.perf_counter()

    def between(self, trainer: Any) -> None:
        """Run between two steps; does nothing here."""

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Write the result."""
        if trainer.is_global_zero:
            write_result(self.out, self.seconds, self.started, **self.more())

    def more(self) -> dict[str, Any]:
        """Return additional results."""
        return {}


class Pair(Clock):
    """Runs the best raw loop between the steps of a Trainer, in alternating bursts."""

    def __init__(self) -> None:
        super().__init__()
        self.theirs: list[float] = []
        self.step: Callable[[], Any] | None = None

    def between(self, trainer: Any) -> None:
        """Run a burst of raw steps after each of the Trainer's bursts."""
        from lockstep.launch.rank import frozen_config
        from lockstep.ranks.ranks import Ranks
        from lockstep.run.directory import RunDirectory

        if self.step is None:
            run = RunDirectory(Path(trainer.default_root_dir))
            self.step = best(self.task, frozen_config(run, Ranks.from_environment()))
            for _ in range(WARMUP):
                self.step()
        done = len(self.seconds) - WARMUP
        if done > 0 and done % self.task.burst == 0:
            self.step()  # not timed: the caches still contain the Trainer's data
            self.theirs += [
                step_seconds(self.step, self.task.device) for _ in range(self.task.burst)
            ]

    def more(self) -> dict[str, Any]:
        """Return the raw loop's median step, and the ratio within each pair of bursts."""
        size = self.task.burst
        ours = self.seconds[WARMUP:]
        ratios = [
            # Skip the Trainer's first step after a pause: the caches contain the raw loop's data.
            statistics.median(ours[at + 1 : at + size])
            / statistics.median(self.theirs[at : at + size])
            for at in range(0, len(self.theirs), size)
        ]
        return {
            "best_seconds": statistics.median(self.theirs),
            "ratio_to_best": statistics.median(ratios),
            "ratios": ratios,
        }


LOOPS: dict[str, Callable[[Task], Callable[[], Any]]] = {
    "plain": plain,
    "accelerate": accelerate,
    "nanogpt": nanogpt,
    "litgpt": litgpt,
}


def main() -> None:
    """Run the named loop, and write its result."""
    task, out = load_task()
    if sys.argv[1] == "stock":
        stock(task)
        return
    started = time.perf_counter()
    rank = int(os.environ.get("RANK", "0"))
    step = LOOPS[sys.argv[1]](task)
    seconds = [step_seconds(step, task.device) for _ in range(WARMUP + task.steps)]
    if rank == 0:
        write_result(out, seconds, started)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
