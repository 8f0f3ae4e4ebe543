from dataclasses import replace
from functools import partial
from itertools import chain

import lightning
import pytest
import torch
import torch.distributed as dist
from lockstep_gpt.gpt import GPT
from lockstep_gpt.optim import adamw, muon
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import functional
from lockstep.batch import Batch
from lockstep.errors import UserError
from lockstep.patches.torch import empty_buckets
from lockstep.plan.counting import Device, step, trace
from lockstep.plan.experiment import training_of
from lockstep.plan.hardware import HARDWARE
from lockstep.plan.memory import Activations, Room
from lockstep.plan.training import States, Training
from lockstep.strategies.placing import ddp

CPU, GPU = (Device(name, 80e9) for name in ("cpu", "cuda"))
ADAMW = partial(adamw, lr=1e-3)
WIDE = {"block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}
LONG = {"block_size": 256, "n_layer": 5, "n_head": 4, "n_embd": 64, "bias": False}


def tokens_of(shape, samples):
    """Return tokens and targets, of which only the shape counts."""
    tokens = torch.zeros(samples, shape["block_size"], dtype=torch.int64)
    return tokens, tokens


def training(shape, vocab_size, **settings):
    with torch.device("meta"):
        model = GPT(vocab_size, **shape)
    known = {"batch": Batch(micro_size=1), "optimizer": ADAMW}
    return Training(model, tokens_of(shape, 1), **{**known, **settings})


def traced(trained, samples, device=CPU, **settings):
    """Return the most bytes alive at once, of a micro-batch of so many samples."""
    what = (trained.model, trained.example, trained.loss, samples, trained.precision, device)
    return trace(*what, trained.units, **settings).peak


def built(shape, vocab_size, precision):
    model = GPT(vocab_size, **shape)
    return model.double() if precision == "64-true" else model


def step_of(model, shape, samples, precision):
    step(model, tokens_of(shape, samples), lambda model, batch: model(*batch), precision)


@pytest.fixture
def measured(measured_peak):
    """The peak of allocated bytes according to torch's allocator, without gradients."""

    def measure(shape, vocab_size, micro_size, precision):
        model = built(shape, vocab_size, precision)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        return measured_peak(lambda: step_of(model, shape, micro_size, precision))

    return measure


@pytest.fixture(scope="module")
def eight_ranks():
    """This process as one of eight ranks that receive nothing from each other."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def test_seven_billion_parameters_with_adam_take_28_28_and_56_gigabytes():
    model = torch.nn.Linear(70_000, 100_000, bias=False, device="meta")  # 7 B
    trained = Training(model, torch.empty(1, 70_000), Batch(micro_size=1))
    assert trained.states == States(28 * 10**9, 28 * 10**9, 56 * 10**9)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize(("shape", "vocab_size"), [(WIDE, 1000), (LONG, 256)])
def test_peak_memory_is_within_a_tenth_of_the_allocator_s(measured, shape, vocab_size, precision):
    predicted = Activations.of(training(shape, vocab_size, precision=precision), CPU)
    assert predicted.at(6) == pytest.approx(measured(shape, vocab_size, 6, precision), rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("samples", [2, 11, 900])
def test_other_micro_batches_are_on_the_line(precision, samples):
    trained = training(WIDE, 1000, precision=precision)
    predicted = Activations.of(trained, CPU).at(samples)
    assert predicted == pytest.approx(traced(trained, samples), rel=0.01)


@pytest.mark.parametrize("device", [CPU, GPU, replace(GPU, memory=8e9, compiled=True)])
def test_the_line_bends_where_logits_are_no_longer_whole(device):
    trained = training({**WIDE, "block_size": 1024}, 50_257, precision="bf16-mixed")
    predicted = Activations.of(trained, device)
    logits = 1024 * 50_304
    if device.compiled:
        assert predicted.bend == int(0.15 * 8e9 / 4) // logits
    for samples in {2, int(predicted.bend), int(predicted.bend) + 1, 40} - {0}:
        assert predicted.at(samples) == pytest.approx(traced(trained, samples, device), rel=0.02)
    if device.accelerator == "cuda":
        assert functional.GPU_CHUNK_LOGITS // 50_304 >= 4096  # rows: products stay efficient


OPTIMIZERS = {
    "adamw": ADAMW,
    "muon": partial(muon, lr=1e-3),
    "fused": partial(torch.optim.AdamW, fused=True),
    "SGD": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_that_the_optimizer_makes(name):
    model = GPT(256, **WIDE)
    optimizer = OPTIMIZERS[name](model.named_parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    size = sum(moment.nbytes for moment in moments if moment is not None and moment.ndim)
    assert training(WIDE, 256, optimizer=OPTIMIZERS[name]).states.optimizer == size


def test_an_optimizer_whose_state_depends_on_values_is_given_as_a_number():
    with pytest.raises(UserError, match="optimizer=NUMBER"):
        _ = training(WIDE, 256, optimizer=torch.optim.Adafactor).states
    states = training(WIDE, 256, optimizer=0.5).states
    assert states.optimizer == states.gradients // 2


def test_frozen_weights_have_no_gradients_and_no_moments():
    trained = training(WIDE, 256)
    trained.model.token_embedding.requires_grad_(False)
    frozen = 256 * 128 * 4
    states = trained.states
    assert states.gradients == states.weights - frozen
    assert states.optimizer == 2 * states.gradients


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_muon_s_momentum():
    trained = training({**WIDE, "n_embd": 64}, 256, optimizer=OPTIMIZERS["muon"])
    whole = trained.states.optimizer
    matrices = 4 * sum(
        weight.numel()
        for name, weight in trained.model.named_parameters()
        if name.startswith("blocks.") and weight.ndim == 2
    )
    assert trained.ownership.saved(1) == 0
    assert trained.ownership.saved(4) == matrices * 3 / 4
    room = Room(trained, HARDWARE["h100"])
    assert [room.memory(1, ranks).optimizer for ranks in (1, 4)] == [
        whole,
        whole - matrices * 3 / 4,
    ]
    assert training(WIDE, 256).ownership is None


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("memory", [2e9, 8e9, 24e9])
def test_the_largest_micro_batch_fits_and_the_next_does_not(memory, compiled):
    trained = training(WIDE, 8192, precision="bf16-mixed", compiled=compiled)
    hardware = replace(HARDWARE["h100"], memory=memory)
    room = Room(trained, hardware)
    most = room.largest_micro_size(1)
    assert room.memory(most, 1).total <= memory < room.memory(most + 1, 1).total
    assert Room(trained, replace(hardware, context=memory)).largest_micro_size(1) == 0


def test_buckets_without_views_are_a_second_copy_of_the_gradients():
    settings = {"gradient_as_bucket_view": False}
    rooms = [Room(training(WIDE, 256, settings=each), HARDWARE["h100"]) for each in ({}, settings)]
    plain, copied = (room.memory(1, 2) for room in rooms)
    assert copied.total - plain.total == copied.buckets == plain.gradients


class Held(lightning.Callback):
    """Finds the most bytes of gradients, sums of gradients, and DDP's buckets in a step."""

    def __init__(self):
        self.most = 0
        self.in_buckets = None  # storages that are buckets

    def on_before_backward(self, trainer, pl_module, _loss=None):
        if self.in_buckets is None:  # in the first step
            return
        present = (weight.grad for weight in pl_module.parameters())
        gradients = [gradient for gradient in present if gradient is not None]
        if trainer.strategy.exact is not None:
            gradients += chain.from_iterable(trainer.strategy.exact._sums.partial())
        storages = [each.untyped_storage() for each in gradients]
        sizes = {each.data_ptr(): each.nbytes() for each in storages}
        beside = sum(size for place, size in sizes.items() if place not in self.in_buckets)
        buckets = empty_buckets(trainer.strategy.model)
        held = beside + sum(bucket.buffer().nbytes for bucket in buckets)
        self.most = max(self.most, held)

    def on_train_batch_start(self, trainer, _module, _batch, batch_idx):
        self.is_last = (batch_idx + 1) % trainer.accumulate_grad_batches == 0

    def on_after_backward(self, trainer, pl_module):
        if self.is_last:
            gradients = [weight.grad for weight in pl_module.parameters()]
            places = {each.untyped_storage().data_ptr() for each in gradients}
            is_view = trainer.strategy.model.gradient_as_bucket_view
            self.in_buckets = places if is_view else set()
        self.on_before_backward(trainer, pl_module)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("default", {1: 1, 4: 1}),
        ("find_unused_parameters", {1: 1, 4: 2}),
        ("gradient_as_bucket_view", {1: 2, 4: 2}),
        ("exact", {1: 1, 4: 3}),
    ],
)
def test_gradients_and_buckets_of_two_ranks_take_the_predicted_bytes(
    on_ranks, new_run, name, copies, accumulation
):
    settings = {"default": {}, "exact": {}}.get(name, {name: name == "find_unused_parameters"})
    strategy = {"gradient_as_bucket_view": True, **settings}
    sizes = {"global_size": 2 * accumulation}
    if name == "exact":
        sizes |= {"micro_size": None, "exact_micro_size": 2}

    def fit(_rank):
        run = new_run(batch=sizes)
        held = Held()
        place = {"process_group_backend": "gloo", "timeout_seconds": 60, "comm_hook": "none"}
        run.fit(held, strategy=ddp(run.batch, **place, **strategy), devices=2)
        return held.most

    run = new_run(batch={**sizes, "global_size": 4 * accumulation}, strategy=strategy)
    model = run.module.model
    shape = {"block_size": model.block_size}
    trained = Training(model, tokens_of(shape, 1), run.batch, optimizer=ADAMW, settings=strategy)
    memory = Room(trained, HARDWARE["h100"]).memory(2, 2)
    predicted_bytes = memory.gradients + memory.buckets + memory.sums
    assert predicted_bytes == copies[accumulation] * memory.gradients
    assert on_ranks(2, fit) == [predicted_bytes] * 2


@pytest.mark.slow
@pytest.mark.parametrize("device", [CPU, GPU])
def test_recomputed_blocks_keep_only_their_inputs(device):
    shape = {**LONG, "dropout": 0.1, "activation_checkpointing": True}
    shallow, deep = (
        traced(training({**shape, "n_layer": layers}, 256), 2, device) for layers in (3, 13)
    )
    input_bytes = 2 * LONG["block_size"] * LONG["n_embd"] * 4  # bytes of a block's input
    assert deep - shallow == 10 * input_bytes


def test_dropout_in_attention_costs_a_gpu_no_mask():
    plain, dropped = (
        training({**LONG, "dropout": share}, 256, precision="bf16-mixed") for share in (0, 0.1)
    )
    more = traced(dropped, 2, GPU) - traced(plain, 2, GPU)
    attention = 2 * LONG["n_layer"] * LONG["n_head"] * LONG["block_size"] ** 2
    assert more < attention * 2  # bytes: less than one matrix of weights in bf16
    assert traced(dropped, 2, CPU) - traced(plain, 2, GPU) > attention * 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_peak_is_within_a_tenth_of_the_gpu_allocator_s(composed, precision):
    trained = training_of(composed(f"precision={precision}", "model=gpt2"), 50_257)
    memory = Room(trained, replace(HARDWARE["h100"], context=0)).memory(8, 1)
    torch.cuda.reset_peak_memory_stats()
    shape = {"block_size": 1024}
    with torch.device("cuda"):
        model = GPT(50_257, n_layer=12, n_head=12, n_embd=768, **shape)
        batch = tokens_of(shape, 8)
    optimizer = trained.optimizer(model.named_parameters())
    for _ in range(2):  # the second has the moments, and the gradients of the first
        step(model, batch, trained.loss, precision)
        optimizer.step()
    assert memory.total == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize(
    ("precision", "gathered"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-mixed", 2)]
)
def test_predicted_gathers_of_fsdp2_are_at_least_those_measured(
    eight_ranks, measured_peak, precision, gathered, reshards
):
    shape = {**WIDE, "n_layer": 8}
    model = built(shape, 1000, precision)
    types = {2: torch.bfloat16, 4: torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=types[gathered], reduce_dtype=torch.float32)
    names = {2: "bfloat16", 4: "float32"}
    settings = {"reshard_after_forward": reshards, "param_dtype": names[gathered]}
    trained = training(shape, 1000, precision=precision, strategy="fsdp2", settings=settings)
    for part in model.blocks:
        fully_shard(part, mesh=eight_ranks, mp_policy=policy, reshard_after_forward=reshards)
    float32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=eight_ranks, mp_policy=float32_policy, reshard_after_forward=True)
    step_of(model, shape, 2, precision)  # from now on, gradients exist
    peak = measured_peak(lambda: step_of(model, shape, 2, precision))
    beside = traced(trained, 2, half_blocks=gathered == 2)
    assert 0.98 < (beside + trained.sharing.gathered) / peak < 1.2
