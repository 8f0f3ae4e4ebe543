"""The work of a step on a GPU, counted on tensors without content, against known speeds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lockstep_gpt import cli
from lockstep_gpt.config import Config
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.cluster import flags
from lockstep_gpt.extras.cluster.hardware import GB, HARDWARE
from lockstep_gpt.extras.cluster.kernels import (
    LOSS,
    MODEL,
    MUON,
    SUMS,
    UPDATE,
    Recorder,
)
from lockstep_gpt.extras.cluster.ledger import Ledger, ledger, trace
from lockstep_gpt.extras.cluster.prediction import predict
from lockstep_gpt.extras.cluster.tracing import shaped
from lockstep_gpt.launch import compose
from lockstep_gpt.model import functional
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.run.callbacks.metrics import Metrics
from lockstep_gpt.settings import is_module
from lockstep_gpt.training.module import GPTModule
from lockstep_gpt.training.optim import build_optimizer
from lockstep_gpt.training.schedule import plan_batch, plan_schedule

VOCAB, PADDED, WIDTH, CONTEXT = 50_257, 50_304, 768, 1024
H100, H200 = HARDWARE["h100"], HARDWARE["h200"]
SMALL = ModelConfig(block_size=64, n_layer=3, n_head=2, n_embd=32)


def composed(*words: str) -> Config:
    return flags.each_job([*words], lambda config: compose.resolve_config(config)[1])[0]


@pytest.fixture(scope="module")
def recipe() -> Config:
    return composed("experiment=gpt2_124m")


def speed(book: Ledger, samples: int, accumulation: int, hardware) -> float:
    seconds = book.compute(accumulation, hardware) + book.of(UPDATE).seconds(hardware)
    return accumulation * samples * CONTEXT / seconds


def recorded(work, compiled=False) -> list:
    recorder = Recorder(compiled)
    with FakeTensorMode(), torch.no_grad():
        inputs = torch.empty(100, 50)
        with recorder:
            result = work(inputs)
    return [*recorder.kernels([result])]


def test_a_product_reads_both_matrices_with_two_operations_per_pair():
    (kernel,) = recorded(lambda x: x @ x.T)
    assert (kernel.read, kernel.written) == (100 * 50 * 4, 100 * 100 * 4)  # one matrix, read once
    assert (kernel.flops, kernel.form) == (2 * 100 * 50 * 100, "tf32")


@pytest.mark.parametrize(("compiled", "moved"), [(False, [2, 2, 2]), (True, [2])])
def test_consecutive_operations_are_one_compiled_kernel(compiled, moved):
    kernels = recorded(lambda x: (x * 2 + 1).relu(), compiled)
    assert [(kernel.read + kernel.written) / (100 * 50 * 4) for kernel in kernels] == moved


def test_inputs_of_fused_kernels_are_recomputed_not_kept():
    def work(x):
        turned = x.bfloat16() @ x.bfloat16().T  # (100, 100)
        wide = turned.float()
        return (wide.sum() * (turned @ turned).float() + wide).relu()

    last = recorded(work, compiled=True)[-1]
    assert last.read == pytest.approx(2 * 100 * 100 * 2, abs=8)  # not the copy in float32


def test_synchronizations_of_the_host_are_counted():
    recorder = Recorder()
    with recorder:
        tensor = torch.ones(3, device="meta")
        for ask in (tensor.sum().item, tensor.cpu, lambda: bool(tensor[0] > 0), tensor.relu):
            ask()
    assert recorder.waits == 3


def test_a_deep_model_is_extrapolated_to_the_byte(recipe):
    config = replace(recipe, model=SMALL)
    deep, drawn = trace(config, SMALL, 300, 2), ledger(config, 300, 2)
    for part in (*MODEL, SUMS, UPDATE):
        assert drawn.of(part).moved == pytest.approx(deep.of(part).moved)
        assert drawn.of(part).total("flops") == deep.of(part).total("flops")
        assert drawn.of(part).kernels.total() == deep.of(part).kernels.total()


def test_products_and_attention_are_those_of_the_model_s_own_count(recipe):
    with torch.device("meta"):
        tokens = 2 * CONTEXT * shaped(recipe.model, VOCAB, recipe.precision).flops_per_token
    # Backward of the fused attention computes its weights again: 7 products for 6.
    more = 2 * CONTEXT * CONTEXT * WIDTH * recipe.model.n_layer
    padding = 6 * 2 * CONTEXT * (PADDED - VOCAB) * WIDTH
    flops = ledger(recipe, VOCAB, 2, H100.memory).total("flops")
    assert flops == pytest.approx(tokens + more + padding, rel=1e-3)


def ideal(samples: int) -> int:
    """Return the minimum bytes for bfloat16 logits and their gradient.

    Logits are written, read for the loss, and read for the gradient. The gradient is written, and
    read by two products.
    """
    return 6 * samples * CONTEXT * PADDED * 2


@pytest.mark.parametrize("samples", [12, 16, 32, 64])
def test_the_loss_moves_little_more_than_its_logits(recipe, samples):
    book = ledger(recipe, VOCAB, samples, H200.memory).of(LOSS)
    assert 1 < book.moved / ideal(samples) <= 1.5
    assert book.kernels.total() < 10  # in one piece


def test_logits_that_need_too_much_memory_are_chunked(recipe):
    """4,096 rows and more at a time, compiled: less than half of what eager chunks move."""
    chunked, eager = (
        ledger(variant, VOCAB, 32, 24e9).of(LOSS)
        for variant in (recipe, replace(recipe, compile=False))
    )
    assert 1.5 * ideal(32) < chunked.moved < min(2.5 * ideal(32), eager.moved / 2)
    assert functional.GPU_CHUNK_LOGITS // PADDED >= 4096


def test_chunks_of_earlier_versions_move_the_counted_bytes(recipe, monkeypatch):
    monkeypatch.setattr(functional, "GPU_CHUNK_LOGITS", 333 * PADDED)
    eager = replace(recipe, compile=False)
    assert ledger(eager, VOCAB, 16).of(LOSS).moved == pytest.approx(66 * GB, rel=0.05)
    monkeypatch.undo()
    assert ledger(eager, VOCAB, 16).of(LOSS).moved == pytest.approx(39 * GB, rel=0.05)


def test_the_time_model_gives_nanogpt_s_speed_on_an_h100(recipe):
    """0.38 M tokens/s: 12 samples, whole logits, autocast, torch.compile."""
    book = ledger(recipe, VOCAB, 12, H100.memory)
    assert speed(book, 12, 40, H100) == pytest.approx(0.38e6, rel=0.2)


def test_the_time_model_gives_llm_c_s_speed_on_an_h100(recipe):
    """0.475 M tokens/s: 64 samples, all in bfloat16, fused as a compiler would."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        book = ledger(replace(recipe, precision="32-true"), VOCAB, 64, 2 * H100.memory)
    finally:
        torch.set_default_dtype(usual)
    assert speed(book, 64, 8, H100) == pytest.approx(0.475e6, rel=0.2)


@pytest.mark.parametrize(
    ("name", "samples", "measured"), [("gpt2_124m", 256, 512e3), ("modern_124m", 64, 514e3)]
)
def test_the_plan_has_the_speed_that_was_measured_on_an_h200(name, samples, measured):
    """The figures in BENCHMARKS.md, of 27 November 2026."""
    config = composed(f"experiment={name}", f"batch.global_size={samples}")
    (row,) = predict(config, H200, (1,), vocab_size=VOCAB).rows
    assert row.tokens_per_second == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_plan_counts_with_the_ledger(recipe):
    row = predict(recipe, H200, (1,), vocab_size=VOCAB).rows[0]
    book = ledger(recipe, VOCAB, row.batch.micro_size, H200.memory)
    assert row.time.compute == pytest.approx(book.compute(row.batch.accumulation, H200))
    assert row.time.optimizer == pytest.approx(book.of(UPDATE).seconds(H200))


@pytest.mark.parametrize(("clip", "per_weight"), [(None, 4 + 4 + 8 + 4 + 8), (1.0, 28 + 12)])
def test_an_update_moves_weights_gradients_and_moments_through_memory(recipe, clip, per_weight):
    optim = replace(recipe.optim, clip_norm=clip)
    book = ledger(replace(recipe, model=SMALL, optim=optim), 300, 2)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in shaped(SMALL, 300, "32-true").parameters())
    assert book.of(UPDATE).moved == pytest.approx(per_weight * weights, rel=0.02)


@pytest.mark.parametrize("words", [(), ("batch.exact_micro_size=32",)], ids=["", "exact"])
def test_muon_s_kernels_are_fused_by_the_compiler_except_with_exact_sums(words):
    config = composed("experiment=modern_124m", "model.ngram_rows=0", *words)
    config.model = replace(SMALL, architecture="modern", bias=False)
    books = [ledger(replace(config, compile=compiled), 300, 2) for compiled in (True, False)]
    numbers = [book.of(MUON).kernels.total() for book in books]
    products = [book.of(MUON).total("flops") for book in books]
    assert products[0] == products[1] > 0
    assert (numbers[0] < numbers[1]) == (not words)
    # Four shapes at most, 15 products and a kernel for the rest.
    assert (numbers[0] <= 4 * 16) == (not words)


@pytest.mark.parametrize("algorithm", ["adamw", *filter(partial(is_module, "training"), ["muon"])])
def test_no_step_between_logged_ones_waits_for_the_device(algorithm):
    config = composed("experiment=smoke", "precision=bf16-mixed", "log_every=10")
    config.optim.algorithm = algorithm
    batch = plan_batch(config.batch, config.model.block_size, 1, 1)
    module = GPTModule(config, plan_schedule(config, batch), ByteTokenizer())
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(), max_steps=100)
    module._trainer, module.logs_losses = trainer, False  # as in our runs
    module.trained = [*module.model.parameters()]
    optimizer = build_optimizer(module.model, config.optim, lr=1e-3)
    metrics = Metrics(config.log_every, batch.tokens_per_step)
    metrics._times = [0.0]
    tokens = torch.zeros(2, config.model.block_size, dtype=torch.int64)

    def step(number: int) -> None:
        for _ in range(2):
            module.training_step((tokens, tokens), 0).backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        module.losses.complete_step()
        optimizer.zero_grad()
        metrics.on_step_end(trainer, module, number)

    step(1)
    recorder = Recorder()
    states = [optimizer.state[weight] for weight in module.trained]
    # Muon counts on the host.
    recorder.host = {*recorder.sizes(state["step"] for state in states if "momentum" in state)}
    with recorder:
        for number in (2, 3):
            step(number)
        assert recorder.waits == 0
        module.losses.take().mean().item()
    assert recorder.waits == 1


def test_the_command_prints_every_part_for_every_device(capsys):
    assert cli.main(["ledger", "experiment=smoke"]) == 0
    out = capsys.readouterr().out
    for name in ("h100", "h200", "a100-80", "rtx4090", *MODEL, SUMS, UPDATE):
        assert name in out
    assert "assumed: 0.6 of the peak in matrix products" in out
    assert "waits for the device 0 times" in out
    assert cli.main(["ledger", "experiment=smoke", "--hardware", "v100"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lockstep-gpt ledger: ")
    assert "v100" in error
    assert error.count("\n") == 1
