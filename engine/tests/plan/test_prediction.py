from dataclasses import replace

import pytest

from lockstep.building import build
from lockstep.errors import UserError
from lockstep.muon.orthogonalization import flops_of
from lockstep.plan.experiment import predicted, training_of, vocabulary
from lockstep.plan.hardware import HARDWARE, LINKS
from lockstep.plan.prediction import can_shard
from lockstep.schedule import scaled_lr

H100 = HARDWARE["h100"]
FIXED = ("batch.global_size=64", "batch.reference_size=64")


@pytest.fixture(scope="module")
def gpt2(composed):
    """GPT-2 with its own vocabulary and a fixed batch, on 1 to 16 devices."""
    config = composed("model=gpt2", "precision=bf16-mixed", *FIXED)
    config.data.source.vocab_size = 50_257
    return config, predicted(config, H100, (1, 2, 4, 8, 16))


@pytest.mark.slow
def test_the_model_is_the_published_one(gpt2):
    parameters = 124_439_808 + 47 * 768  # Radford et al. 2019, and the padding of the head
    assert gpt2[1].parameters == parameters
    assert gpt2[1].samples * 1024 == 20 * parameters
    assert gpt2[1].gradient_bytes == 4 * parameters


def test_batch_and_learning_rate_are_training_s_own(gpt2):
    config, plan = gpt2
    for row in plan.rows:
        batch = build(config.batch).spread_over(row.batch.devices, row.batch.nodes)
        lr = scaled_lr(config.optim.lr, batch, config.lr_scaling)
        assert (row.batch, row.lr) == (batch, lr)


def test_a_fixed_batch_scales_strongly_and_loses_efficiency(gpt2):
    plan = gpt2[1]
    assert plan.scaling == "strong"
    assert {row.batch.global_size for row in plan.rows} == {64}
    efficiencies = [row.efficiency for row in plan.rows]
    assert efficiencies[0] == 1
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert all(0 < efficiency <= 1 for efficiency in efficiencies)


def test_time_and_speed_agree(gpt2):
    for row in gpt2[1].rows:
        assert row.seconds * row.samples_per_second == pytest.approx(gpt2[1].samples)
        assert row.batch.global_size / row.time.total == pytest.approx(row.samples_per_second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "samples", "measured"), [("gpt2_124m", 256, 512e3), ("modern_124m", 64, 514e3)]
)
def test_the_assumed_utilization_is_near_the_one_of_an_h200(composed, name, samples, measured):
    """The figures in BENCHMARKS.md, of 27 November 2026."""
    config = composed(f"experiment={name}", f"batch.global_size={samples}")
    (row,) = predicted(config, HARDWARE["h200"], (1,), vocab_size=50_257).rows
    assert row.samples_per_second * 1024 == pytest.approx(measured, rel=0.1)


def test_a_step_computes_its_operations_at_the_assumed_part_of_the_peak(gpt2):
    config, plan = gpt2
    # 6 operations per weight, and 12 x layers x width x context in attention, of which the causal
    # mask leaves half (Chowdhery et al. 2022, appendix B).
    weights = 124_439_808 - 1024 * 768  # without the positions, which multiply nothing
    expected = 6 * weights + 6 * 12 * 768 * 1024
    assert plan.flops / 1024 == pytest.approx(expected, rel=0.001)
    (row, *_) = plan.rows
    expected = 64 * plan.flops / (0.4 * 989.5e12)
    assert row.time.compute == pytest.approx(expected)
    measured = replace(H100, utilisation=0.2)
    assert predicted(config, measured, (1,)).rows[0].time.compute == pytest.approx(2 * expected)


def test_muon_s_products_are_part_of_the_update(composed):
    words = ("model=gpt2", "clip_norm=1.0", "batch.global_size=64")
    configs = (composed(f"optim={name}", *words) for name in ("muon", "adamw"))
    muon, adamw = (predicted(config, H100, (1,)) for config in configs)
    blocks = 12 * sum(map(flops_of, [(2304, 768), (768, 768), (3072, 768), (768, 3072)]))
    seconds = blocks / (0.4 * 989.5e12)
    moved = 8 * 85e6 / (0.7 * 3350e9)  # AdamW reads and writes one more moment of the blocks
    more = muon.rows[0].time.optimizer - adamw.rows[0].time.optimizer
    assert more == pytest.approx(seconds - moved, rel=0.02)


def test_nodes_are_filled_one_after_the_other(gpt2):
    layouts = [(row.batch.devices, row.batch.nodes) for row in gpt2[1].rows]
    assert layouts == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)]


def test_a_batch_grows_with_the_devices_if_that_is_asked_for(composed):
    config = composed("lr_scaling=sqrt")  # 12 samples
    plan = predicted(config, H100, (1, 64), scaling="weak")
    assert plan.scaling == "weak"
    assert [row.batch.global_size for row in plan.rows] == [12, 12 * 64]
    assert plan.rows[1].lr == pytest.approx(8 * plan.rows[0].lr)


def test_an_impossible_row_has_its_reason(composed):
    plan = predicted(composed(), H100, (1, 5, 12))
    assert [row.batch.world_size for row in plan.rows] == [1]
    assert "is not divisible" in plan.refused[5]
    assert plan.refused[12] == (
        "12 devices are not a whole number of nodes of 8 each; set --per-node"
    )


def test_the_price_counts_every_device(composed):
    plan = predicted(composed(), H100, (1, 4), samples=1e6, price=2.0)
    for row in plan.rows:
        assert row.cost == pytest.approx(row.seconds / 3600 * row.batch.world_size * 2.0)


def test_slow_links_cost_efficiency(composed):
    config = composed("model=gpt2", "precision=bf16-mixed", "batch.global_size=16")
    slow = replace(H100, inter=LINKS["1gbe"], adapters=1)
    fast, lame = (predicted(config, hardware, (16,)).rows[0] for hardware in (H100, slow))
    assert lame.time.exposed > 10 * fast.time.exposed
    assert lame.efficiency < 0.5 * fast.efficiency


@pytest.mark.slow
def test_a_misfit_is_printed_with_settings_that_fit(composed):
    config = composed("model=gpt2_xl", "precision=32-true", "batch.global_size=64")
    row = predicted(config, HARDWARE["a100-40"], (1,)).rows[0]
    assert not row.fits
    assert 0 < row.largest_micro_size < 64
    assert predicted(config, HARDWARE["t4"], (1,)).rows[0].largest_micro_size == 0


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["strategy.comm_hook=powersgd", "launch.max_restarts=0"], "powersgd is planned without"),
        (["compile=true"], "compile=true keeps fewer"),
        (["precision=32-true"], "bf16-mixed has 2.0 times the peak"),
    ],
)
def test_omissions_are_noted(composed, words, note):
    assert any(note in line for line in predicted(composed(*words), H100, (1,)).notes)


def test_linear_scaling_beyond_its_tested_range_is_noted(composed):
    noted = [
        any(
            "Goyal" in note
            for note in predicted(composed(), H100, (1, devices), scaling="weak").notes
        )
        for devices in (8, 1024)
    ]
    assert noted == [False, True]


def test_a_precision_that_the_device_lacks_is_rejected(composed):
    with pytest.raises(UserError, match="precision=bf16-mixed"):
        predicted(composed("precision=bf16-mixed"), HARDWARE["t4"], (1,))


def test_the_vocabulary_is_that_of_the_data(composed):
    data = composed().data
    assert vocabulary(data) == 256
    data.source.vocab_size = 999
    assert vocabulary(data) == 999


FEW = 8192  # of GPT-2's 50,257: tracing takes as long as there are logits
LARGE = ("model=gpt2_large", "optim=adamw", "precision=bf16-mixed", "batch.global_size=64")


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_fsdp2_divides_the_states_by_the_ranks(composed, optim):
    words = (*LARGE[:1], f"optim={optim}", *LARGE[2:], "strategy=fsdp2")
    one, eight = predicted(composed(*words), H100, (1, 8)).rows
    for part in ("weights", "gradients", "optimizer"):
        share = getattr(one.memory, part) / 8
        assert getattr(eight.memory, part) == pytest.approx(share, rel=1e-6)
    assert (one.memory.gathered, one.time.all_reduce) == (0, 0)
    assert eight.memory.gathered > 0
    assert eight.time.algorithm == "ring"


def test_gathered_weights_of_fsdp2_count_as_memory(composed):
    settings = ([], ["strategy.reshard_after_forward=false"], ["strategy.param_dtype=bfloat16"])
    again, gathered_once, half = (
        predicted(composed(*LARGE, "strategy=fsdp2", *words), H100, (8,)).rows[0]
        for words in settings
    )
    assert gathered_once.memory.gathered > 10 * again.memory.gathered  # of 36 blocks 36, not 2
    assert gathered_once.time.all_reduce < again.time.all_reduce
    assert half.memory.gathered < again.memory.gathered
    assert half.memory.total < again.memory.total  # also no copies for autocast
    assert half.time.all_reduce < again.time.all_reduce


@pytest.mark.slow
def test_a_misfit_has_remedies(composed):
    config = composed(*LARGE)
    one, four = predicted(config, HARDWARE["rtx4090"], (1, 4), vocab_size=FEW).rows
    assert [one.fits, four.fits] == [False, False]
    for row in (one, four):
        assert row.remedies
        for remedy in row.remedies:
            again = composed(*LARGE, *remedy.words.split())
            devices = (row.batch.world_size,)
            fits = predicted(again, HARDWARE["rtx4090"], devices, vocab_size=FEW).rows[0]
            assert fits.fits, remedy
            assert fits.memory.total == pytest.approx(remedy.memory, rel=1e-3)
    words = [remedy.words for remedy in (*one.remedies, *four.remedies)]
    assert any("batch.micro_size=" in setting for setting in words)
    assert any("model.activation_checkpointing=true" in setting for setting in words)


@pytest.mark.slow
def test_a_model_larger_than_a_device_is_advised_to_shard(composed):
    config = composed("model=gpt2_xl", "optim=adamw", "precision=bf16-mixed", "batch.micro_size=1")
    one, eight = predicted(config, HARDWARE["rtx4090"], (1, 8), scaling="weak", vocab_size=FEW).rows
    assert one.remedies == []
    assert [remedy.words for remedy in eight.remedies] == ["strategy=fsdp2"]


@pytest.mark.parametrize(
    ("words", "shards"),
    [([], True), (["batch.exact_micro_size=1"], False), (["precision=64-true"], False)],
)
def test_sharding_is_no_remedy_where_it_does_not_work(composed, words, shards):
    config = composed("experiment=smoke", "optim=adamw", "precision=32-true", *words)
    assert can_shard(training_of(config, 256)) == shards


def test_a_fit_has_no_remedy(gpt2):
    assert all(row.fits and row.remedies == [] for row in gpt2[1].rows)


def test_sums_in_one_order_take_room_and_only_some_numbers_of_devices(composed):
    words = ("model=gpt2", "batch.global_size=96", "batch.reference_size=96")
    exact = predicted(composed(*words, "batch.exact_micro_size=2"), H100, (1, 2, 3, 24, 48))
    plain = predicted(composed(*words, "batch.micro_size=2"), H100, (1, 3, 24, 48))
    assert [row.batch.world_size for row in exact.rows] == [1, 3, 24, 48]
    assert "gives equal bits on 1, 3, 6, 12, 24, or 48 devices" in exact.refused[2]
    for ours, row, sums in zip(exact.rows, plain.rows, (5, 4, 1, 0), strict=True):
        more = ours.memory.sums - row.memory.sums
        assert more == sums * plain.gradient_bytes  # log2 of the number of a rank's micro-batches


@pytest.mark.slow
def test_tensor_ranks_share_states_and_wait_for_their_sums(composed):
    words = ("model=gpt2", "optim=adamw", "precision=bf16-mixed", "strategy=fsdp2", *FIXED)

    def plan(size):
        config = composed(*words, "batch.micro_size=4", f"strategy.tensor_parallel={size}")
        return predicted(config, replace(H100, kernel_seconds=0.0), (1, 8), vocab_size=50_257)

    whole, split = plan(1).rows[-1], plan(4).rows[-1]
    assert plan(4).refused[1].startswith("strategy.tensor_parallel=4 does not divide 1 device")
    assert (split.batch.data_parallel, split.batch.accumulation) == (2, 8)
    assert split.time.compute == pytest.approx(whole.time.compute, rel=0.05)
    # At most so much, as a rank computes parts of layers; it adds up the gradients of its part.
    assert replace(split.memory, sums=whole.memory.sums) == whole.memory
    assert split.memory.sums == whole.memory.sums // 4
    # Activations in bfloat16: four times per block, the embeddings, and the head's gradient.
    activations = 4 * 1024 * 768 * 2
    bandwidth = H100.intra.bandwidth * H100.link_efficiency
    seconds = 8 * (4 * 12 + 2) * activations * 2 * 3 / 4 / bandwidth
    assert seconds < split.time.exposed < 1.5 * seconds
    assert split.time.exposed < split.time.all_reduce


# By the formulas that plans had for our own models only: micro-batches of 12 samples
# on one H100 in bf16-mixed with Muon, and of 3 on each of four. Bytes, and milliseconds of a step.
REFERENCE = {
    "nano": ((1.029e9, 1.213), (1.014e9, 1.238)),
    "modern_nano": ((1.055e9, 1.233), (1.052e9, 1.284)),
    "gpt2": ((9.516e9, 29.814), (5.230e9, 9.458)),
    "modern_124m": ((10.182e9, 30.539), (5.850e9, 9.892)),
    "gpt2_large": ((35.311e9, 212.857), (16.864e9, 62.397)),
    "modern_1b": ((68.478e9, 631.802), (31.033e9, 173.304)),
}


@pytest.mark.slow
@pytest.mark.parametrize("preset", REFERENCE)
def test_presets_are_planned_as_by_formulas_of_their_own(composed, preset):
    config = composed(f"model={preset}", "precision=bf16-mixed")
    vocab_size = 256 if "nano" in preset else 50_257
    plan = predicted(config, H100, (1, 4), vocab_size=vocab_size)
    for row, (size, milliseconds) in zip(plan.rows, REFERENCE[preset], strict=True):
        assert row.memory.total == pytest.approx(size, rel=0.1)
        assert row.time.total * 1e3 == pytest.approx(milliseconds, rel=0.1)
