from itertools import chain

import lightning
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep import functional
from lockstep.cluster import memory
from lockstep.cluster.choices import with_node
from lockstep.cluster.fitting import Room
from lockstep.cluster.hardware import HARDWARE
from lockstep.cluster.memory import (
    Chunks,
    Footprint,
    States,
    footprint,
)
from lockstep.cluster.sharing import Ownership, Sharing, optimizer_of
from lockstep.cluster.tracing import built, step, trace_peak
from lockstep.patches.torch import empty_buckets
from lockstep.strategies.placing import ddp

pytestmark = pytest.mark.usefixtures("traced_once")


def shape_of(**sizes):
    return OmegaConf.create({"_target_": "lockstep_gpt.gpt.GPT", **sizes})


def changed(shape, **sizes):
    return OmegaConf.merge(shape, sizes)


WIDE = shape_of(block_size=64, n_layer=4, n_head=4, n_embd=128)
LONG = shape_of(block_size=256, n_layer=5, n_head=4, n_embd=64, bias=False)
ADAMW = {"_target_": "lockstep_gpt.optim.adamw", "_partial_": True, "lr": 1e-3}


def measured(shape, vocab_size, micro_size, precision):
    """The peak of allocated bytes according to torch's allocator, without gradients."""
    model = built(shape, vocab_size, precision)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    return measured_peak(lambda: step(model, micro_size, shape.block_size, precision))


def measured_peak(work):
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as report:  # no warning
        work()
    events = [event for event in report.profiler.kineto_results.events() if event.nbytes()]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.fixture(scope="module")
def eight_ranks():
    """This process as one of eight ranks that receive nothing from each other."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (8,))
    dist.destroy_process_group()


def predicted(composed, shape, vocab_size, precision, *words):
    config = composed(f"precision={precision}", *words)
    config = with_node(config, "model", shape)
    return footprint(config, memory.whole_model(config, vocab_size), "cpu")


def test_seven_billion_parameters_with_adam_take_28_28_and_56_gigabytes():
    model = torch.nn.Linear(70_000, 100_000, bias=False, device="meta")  # 7 B
    assert States.of(model, OmegaConf.create(ADAMW)) == States(28 * 10**9, 28 * 10**9, 56 * 10**9)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
@pytest.mark.parametrize(("shape", "vocab_size"), [(WIDE, 1000), (LONG, 256)])
def test_peak_memory_is_within_a_tenth_of_the_allocator_s(composed, shape, vocab_size, precision):
    line = predicted(composed, shape, vocab_size, precision)
    peak = line.memory(6, context=0, bucket_copies=False)
    beside_states = peak.copies + peak.activations + peak.logits
    assert beside_states == pytest.approx(measured(shape, vocab_size, 6, precision), rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_small_shapes_give_the_line_of_deep_ones(composed, precision):
    shape = changed(WIDE, n_layer=9)
    line = predicted(composed, shape, 1000, precision)
    peak = line.memory(11, context=0, bucket_copies=False)
    traced = trace_peak(shape, 1000, 11, precision, "cpu")
    assert peak.copies + peak.activations + peak.logits == pytest.approx(traced, rel=0.01)


@pytest.mark.slow
def test_only_logits_grow_with_the_vocabulary(composed):
    narrow = predicted(composed, WIDE, 1024, "32-true")
    broad = predicted(composed, WIDE, 8 * 1024, "32-true")
    assert broad.logits == pytest.approx(8 * narrow.logits, rel=0.01)
    assert broad.activations == pytest.approx(narrow.activations, rel=0.01)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_states_are_those_that_the_optimizer_makes(composed, optim):
    config = composed(f"optim={optim}").optim
    model = built(WIDE, 256, "32-true")
    optimizer = optimizer_of(config, model)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    size = sum(moment.nbytes for moment in moments if moment.ndim)
    assert States.of(model, config).optimizer == size


@pytest.mark.slow
def test_a_rank_keeps_its_share_of_muon_s_momentum(composed):
    config = composed("optim=muon", "model.n_layer=4", "model.n_embd=64")
    model = memory.whole_model(config, 256)
    whole = States.of(model, config.optim).optimizer
    matrices = 4 * sum(
        weight.numel()
        for name, weight in model.named_parameters()
        if name.startswith("blocks.") and weight.ndim == 2
    )
    ownership = Ownership.of(config, model)
    assert ownership.saved(1) == 0
    assert ownership.saved(4) == matrices * 3 / 4
    room = Room.of(config, HARDWARE["h100"], 256)
    assert [room.memory(1, ranks).optimizer for ranks in (1, 4)] == [
        whole,
        whole - matrices * 3 / 4,
    ]
    assert Ownership.of(composed("optim=adamw"), model) is None


def test_the_largest_micro_batch_fits_and_the_next_does_not(composed):
    line = predicted(composed, WIDE, 1000, "32-true")
    most = line.largest_micro_size(1e9, context=1e8, bucket_copies=False)
    assert line.memory(most, 1e8, False).total <= 1e9 < line.memory(most + 1, 1e8, False).total
    assert line.largest_micro_size(1e6, context=0, bucket_copies=False) == 0


def test_buckets_without_views_are_a_second_copy_of_the_gradients(composed):
    line = predicted(composed, WIDE, 1000, "32-true")
    more = line.memory(1, 0, bucket_copies=True).total - line.memory(1, 0, False).total
    assert more == line.states.gradients


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
    nodes = {"model": {"_target_": "lockstep_gpt.gpt.GPT"}, "optim": ADAMW}
    config = OmegaConf.merge(run.config, nodes)
    room = Room.of(config, HARDWARE["h100"], run.module.model.vocab_size)
    memory = room.memory(2, 2)
    predicted_bytes = memory.gradients + memory.buckets + memory.copies - room.alone.copies
    assert predicted_bytes == copies[accumulation] * memory.gradients
    assert on_ranks(2, fit) == [predicted_bytes] * 2


@pytest.mark.parametrize("compiled", [True, False])
def test_logits_of_a_gpu_are_chunked_only_if_they_do_not_fit(composed, compiled):
    config = composed("model=gpt2", "precision=bf16-mixed", f"compile={compiled}")
    logits, chunks = 1024 * 50_304, Chunks.of(config, 50_304, 80e9)
    limit = 0.15 * 80e9 / 4 if compiled else functional.GPU_CHUNK_LOGITS
    assert chunks.most_whole == limit // logits
    assert functional.GPU_CHUNK_LOGITS // 50_304 >= 4096  # rows, so that products stay efficient
    assert chunks.size(2) == 2 * logits * (2 + 2 if compiled else 2 + 4 + 2)
    assert chunks.size(chunks.most_whole + 1) == functional.GPU_CHUNK_LOGITS * 8
    for activations in (2e8, 1e9, 3e9):
        line = Footprint(States(0, 0, 0), 0, activations, 0, chunks=chunks)
        for size in (4e9, 24e9, 80e9):
            most = line.largest_micro_size(size, 0, False)
            assert line.memory(most, 0, False).total <= size
            assert line.memory(most + 1, 0, False).total > size


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_recomputed_blocks_keep_only_their_inputs(accelerator):
    shape = changed(LONG, dropout=0.1, activation_checkpointing=True)
    shallow, deep = (
        trace_peak(changed(shape, n_layer=layers), 256, 2, "32-true", accelerator)
        for layers in (3, 13)
    )
    input_bytes = 2 * LONG.block_size * LONG.n_embd * 4  # bytes of a block's input
    assert deep - shallow == 10 * input_bytes


def test_dropout_in_attention_costs_a_gpu_no_mask():
    plain, dropped = (
        trace_peak(changed(LONG, dropout=share), 256, 2, "bf16-mixed", "cuda") for share in (0, 0.1)
    )
    attention = 2 * LONG.n_layer * LONG.n_head * LONG.block_size**2
    assert dropped - plain < attention * 2  # bytes: less than one matrix of weights in bf16
    on_cpu = trace_peak(changed(LONG, dropout=0.1), 256, 2, "bf16-mixed", "cpu")
    assert on_cpu - plain > attention * 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_peak_is_within_a_tenth_of_the_gpu_allocator_s(composed, precision):
    config = composed(f"precision={precision}", "model=gpt2")
    line = footprint(config, memory.whole_model(config, 50257), "cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = built(config.model, 50257, precision)
    optimizer = optimizer_of(config.optim, model)
    for _ in range(2):  # the second has the moments, and the gradients of the first
        step(model, 8, config.model.block_size, precision)
        optimizer.step()
    peak = line.memory(8, context=0, bucket_copies=False).total
    assert peak == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("n_layer", [4, 9])
def test_a_large_vocabulary_does_not_bend_the_line(composed, precision, n_layer):
    shape = shape_of(block_size=256, n_layer=n_layer, n_head=4, n_embd=512)
    line = predicted(composed, shape, 50257, precision)
    for micro_size in (8, 13):
        peak = line.memory(micro_size, context=0, bucket_copies=False)
        traced = trace_peak(shape, 50257, micro_size, precision, "cpu")
        assert peak.copies + peak.activations + peak.logits == pytest.approx(traced, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize(
    ("precision", "gathered"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-mixed", 2)]
)
def test_predicted_gathers_of_fsdp2_are_at_least_those_measured(
    eight_ranks, precision, gathered, reshards
):
    shape = changed(WIDE, n_layer=8)
    model = built(shape, 1000, precision)
    types = {2: torch.bfloat16, 4: torch.float32}
    policy = MixedPrecisionPolicy(param_dtype=types[gathered], reduce_dtype=torch.float32)
    block = sum(weight.numel() for weight in model.blocks[0].parameters())
    rest = model.num_parameters - 8 * block + 24 * 128  # with the padding of the vocabulary
    for part in model.blocks:
        fully_shard(part, mesh=eight_ranks, mp_policy=policy, reshard_after_forward=reshards)
    float32_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fully_shard(model, mesh=eight_ranks, mp_policy=float32_policy, reshard_after_forward=True)
    step(model, 2, shape.block_size, precision)  # from now on, gradients exist
    peak = measured_peak(lambda: step(model, 2, shape.block_size, precision))
    sharing = Sharing(8, block, rest, reshards, gathered, reduced_size=4)
    beside = trace_peak(shape, 1000, 2, precision, "cpu", half_blocks=gathered == 2)
    assert 0.98 < (beside + sharing.gathered) / peak < 1.2
