"""The kernels of a run on a CPU: measured once, and then kept."""

import json

import pytest
import torch
import yaml

from lockstep_gpt.config import Config
from lockstep_gpt.errors import UserError
from lockstep_gpt.model import cpu_kernels
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.run.directory import RunDirectory
from lockstep_gpt.training import kernel_timing, kernels, remembered
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.kernel_settings import KernelConfig
from lockstep_gpt.training.kernel_timing import Candidate, Shape
from lockstep_gpt.training.optim_settings import OptimConfig

# Microseconds of a layer per token: linear layers by (products, precision), and attention.
# On a Xeon with avx512_bf16 and without AMX, MKL is as fast as oneDNN, and bfloat16 half as fast.
INTEL_WITHOUT_AMX = {
    ("onednn", "32-true"): 10.6,
    ("blas", "32-true"): 10.0,
    ("onednn", "bf16-mixed"): 21.0,
    ("plain", "onednn"): 4.0,
    ("fused", "onednn"): 9.0,
    ("plain", "blas"): 4.0,
    ("fused", "blas"): 4.5,
    ("plain", "bf16-mixed"): 4.0,
    ("fused", "bf16-mixed"): 6.0,
}
# As on a Zen 5: oneDNN is over twice as fast as MKL, and bfloat16 nearly twice as fast as that.
AMD = INTEL_WITHOUT_AMX | {
    ("blas", "32-true"): 24.0,
    ("onednn", "32-true"): 10.0,
    ("onednn", "bf16-mixed"): 6.0,
    ("plain", "bf16-mixed"): 2.5,
}
# MKL's products at half of oneDNN's speed, but a fused kernel that makes up for it.
FAST_FUSED = INTEL_WITHOUT_AMX | {("fused", "blas"): 1.0}
MUON_IN_FLOAT32 = {"bfloat16": 2e-3, "float32": 1.5e-3, "gram": 1e-3}


def config_of(*, muon=False, length=64, exact=None, **settings):
    model = ModelConfig(block_size=length, n_layer=1, n_head=4, n_embd=128)
    optim = OptimConfig(
        algorithm="muon" if muon else "adamw", lr=0.1, warmup_steps=1, weight_decay=0.0
    )
    batch = BatchConfig(micro_size=None if exact else 4, exact_micro_size=exact, global_size=4)
    return Config(
        max_steps=1,
        model=model,
        optim=optim,
        batch=batch,
        kernels=settings.pop("kernels", KernelConfig(measure=True)),
        trainer={"accelerator": "cpu", "devices": 1},
        **settings,
    )


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    """Remember nothing from other tests, and leave the process as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with cpu_kernels.restored_afterward():
        yield


@pytest.fixture
def processor(monkeypatch):
    """Emulate a processor by the times that a measurement gives."""

    def emulate(times, forms=MUON_IN_FLOAT32, threads=None):
        def layer_seconds(_, candidates):
            return {
                each: 1e-6 * (times[each.linear] + times[each.attention, kind_of(each)])
                for each in candidates
            }

        def kind_of(each):
            return each.precision if each.precision == "bf16-mixed" else each.products

        monkeypatch.setattr(kernel_timing, "layer_seconds", layer_seconds)
        monkeypatch.setattr(
            kernel_timing,
            "newton_schulz_seconds",
            lambda _, names: {name: forms[name] for name in names},
        )
        monkeypatch.setattr(
            kernel_timing, "thread_seconds", lambda *_: threads or {torch.get_num_threads(): 1.0}
        )
        monkeypatch.setattr(kernels, "is_busy", lambda: False)

    return emulate


def chosen(config, *, is_exact=True):
    settings = kernels.decide(config, is_exact)["settings"]
    of_kernels = settings["kernels"]
    return settings["precision"], of_kernels["products"], of_kernels["attention"]


def test_on_intel_without_amx_float32_is_chosen_and_on_amd_bfloat16(processor):
    processor(INTEL_WITHOUT_AMX)
    assert chosen(config_of(precision="auto")) == ("32-true", "blas", "plain")
    processor(AMD)
    assert chosen(config_of(precision="auto", seed=2, length=65)) == (
        "bf16-mixed",
        "onednn",
        "plain",
    )


def test_a_precision_that_is_set_stays(processor):
    processor(INTEL_WITHOUT_AMX)
    assert chosen(config_of(precision="bf16-mixed"))[0] == "bf16-mixed"


def test_the_products_of_float32_are_those_of_the_faster_layer(processor):
    processor(AMD)
    assert chosen(config_of()) == ("32-true", "onednn", "plain")
    processor(FAST_FUSED)
    assert chosen(config_of(length=65)) == ("32-true", "blas", "fused")


def test_a_small_difference_could_be_noise_so_the_rule_decides(processor):
    processor(INTEL_WITHOUT_AMX | {("blas", "32-true"): 10.5})
    assert chosen(config_of()) == ("32-true", "onednn", "plain")
    processor(INTEL_WITHOUT_AMX | {("onednn", "bf16-mixed"): 9.5})
    assert chosen(config_of(precision="auto")) == ("32-true", "blas", "plain")


def test_products_that_are_not_exact_are_not_used(processor, caplog):
    processor(AMD)
    assert chosen(config_of(), is_exact=False)[1] == "blas"
    wanted = KernelConfig(measure=True, products="onednn")
    assert chosen(config_of(kernels=wanted), is_exact=False)[1] == "blas"
    assert "kernels.products=onednn would round to bfloat16" in caplog.text


def test_long_contexts_are_not_timed_with_all_pairs_of_tokens(processor):
    processor(AMD)
    config = config_of(length=kernel_timing.LONGEST_PLAIN + 1)
    assert chosen(config) == ("32-true", "onednn", "fused")


def test_exact_runs_and_runs_without_a_measurement_follow_rules(processor):
    processor(FAST_FUSED)
    assert chosen(config_of(exact=2)) == ("32-true", "onednn", "plain")
    assert chosen(config_of(kernels=KernelConfig())) == ("32-true", "onednn", "plain")
    assert chosen(config_of(exact=2, length=129)) == ("32-true", "onednn", "fused")
    assert chosen(config_of(exact=2), is_exact=False) == ("32-true", "blas", "plain")


def test_muon_uses_the_fastest_form(processor):
    processor(AMD)
    decided = kernels.decide(config_of(muon=True), True)["settings"]["kernels"]
    assert decided["newton_schulz"] == "gram"
    processor(AMD, forms={"bfloat16": 1e-3, "float32": 2e-3, "gram": 1.5e-3})
    decided = kernels.decide(config_of(muon=True, length=65), True)["settings"]["kernels"]
    assert decided["newton_schulz"] == "bfloat16"
    assert kernels.decide(config_of(), True)["settings"]["kernels"]["newton_schulz"] is None


@pytest.mark.parametrize(
    ("seconds", "threads"),
    [
        ({8: 1.0, 4: 0.9, 2: 0.8, 1: 0.7}, 8),
        ({8: 1.0, 4: 0.5, 2: 0.4, 1: 0.3}, 1),
        ({8: 1.0, 4: 0.5, 2: 0.45, 1: 0.4}, 4),
        ({1: 0.0}, 1),
    ],
)
def test_fewer_threads_are_used_only_if_that_is_clearly_faster(processor, seconds, threads):
    processor(AMD, threads=seconds)
    assert kernels.decide(config_of(), True)["settings"]["kernels"]["threads"] == threads


def test_a_busy_machine_times_no_threads(processor, monkeypatch):
    processor(AMD, threads={2: 1.0, 1: 0.1})
    monkeypatch.setattr(kernels, "is_busy", lambda: True)
    decided = kernels.decide(config_of(), True)["settings"]["kernels"]
    assert decided["threads"] == torch.get_num_threads()


def test_another_run_on_the_machine_decides_alike(processor, tmp_path):
    processor(AMD)
    first = kernels.decide(config_of(), True)
    processor(FAST_FUSED)
    assert kernels.decide(config_of(), True) == first
    [file] = (tmp_path / "cache").rglob("*.json")
    file.write_text("{")  # damaged: measured again
    assert chosen(config_of()) == ("32-true", "blas", "fused")
    assert json.loads(file.read_text())["found"]["chosen"] == str(
        Candidate("blas", "fused", "32-true")
    )


def test_of_two_runs_that_measure_at_once_both_use_what_the_first_has_found():
    assert remembered.remember({"a": 1}, {"chosen": "x"}) == {"chosen": "x"}
    assert remembered.remember({"a": 1}, {"chosen": "y"}) == {"chosen": "x"}
    assert remembered.recall({"a": 2}) is None


def test_without_a_folder_to_remember_in_a_run_measures(processor, tmp_path):
    (tmp_path / "cache").write_text("a file")
    processor(AMD)
    assert chosen(config_of()) == ("32-true", "onednn", "plain")


def test_every_candidate_is_timed_and_the_process_is_left_as_it_was():
    before = state_of_process()
    products = ("blas", "onednn")
    candidates = [
        *(Candidate(name, kind, "32-true") for name in products for kind in ("plain", "fused")),
        *(Candidate("onednn", kind, "bf16-mixed") for kind in ("plain", "fused")),
    ]
    for shape in (Shape(32, 2, 32), Shape(128, 4, 64), Shape(768, 12, 1024)):
        seconds = kernel_timing.layer_seconds(shape, candidates)
        assert set(seconds) == set(candidates)
        assert all(0 < each < 0.1 for each in seconds.values())
    assert state_of_process() == before


def state_of_process():
    precision = torch.get_float32_matmul_precision()
    return torch.get_num_threads(), precision, cpu_kernels.in_use


def test_more_threads_than_one_are_timed_by_halves():
    torch.set_num_threads(2)
    seconds = kernel_timing.thread_seconds(
        Shape(32, 2, 16), 2, Candidate("blas", "plain", "32-true"), 2
    )
    assert set(seconds) == {1, 2}
    assert torch.get_num_threads() == 2
    large = Shape(4096, 32, 2048)
    assert kernel_timing.thread_seconds(large, 8, Candidate("blas", "plain", "32-true"), 2) == {
        2: 0.0
    }


def test_all_ranks_use_what_rank_0_has_measured(on_ranks, processor):
    def rank(number):
        if number == 1:  # another processor, on which oneDNN rounds to bfloat16
            cpu_kernels.onednn_is_exact = lambda: False
        processor(AMD if number == 0 else INTEL_WITHOUT_AMX)
        config = kernels.decided(config_of(precision="auto"), None)
        return config.precision, config.kernels

    zero, one = on_ranks(2, rank)
    assert zero == one
    assert zero[0] == "bf16-mixed"
    assert zero[1].products == "blas"  # exact on both


def values_of(folder):
    return RunDirectory(folder).values()


@pytest.mark.slow
def test_a_run_keeps_its_kernels_when_it_is_resumed(command, processor):
    words = ("kernels.measure=true", "precision=auto", "run_dir=run")
    processor(FAST_FUSED)
    command.train("max_steps=10", *words)
    first = values_of(command.folder / "run")
    assert first["precision"] == "32-true"
    assert first["kernels"]["attention"] == "fused"
    log = (command.folder / "run/train.log").read_text()
    assert "kernels    matrix products by MKL" in log or "kernels    matrix products by BLAS" in log
    assert "fused/32-true 11" in log

    processor(AMD)
    command.train("max_steps=20", "run_dir=run", "resume=auto")
    resumed = values_of(command.folder / "run")
    assert resumed["precision"] == "32-true"
    assert resumed["kernels"] == first["kernels"]
    # The same command again, with its experiment, and with what was open when the run began.
    command.train("max_steps=30", *words, "resume=auto")
    assert values_of(command.folder / "run")["kernels"] == first["kernels"]
    saved = torch.load(
        next((command.folder / "run/checkpoints").glob("step=*30.ckpt")), weights_only=True
    )
    assert saved["config"]["kernels"]["attention"] == "fused"


@pytest.mark.slow
def test_a_run_that_began_without_these_settings_follows_the_rules(command, processor):
    command.train("max_steps=10", "run_dir=run")
    run = RunDirectory(command.folder / "run")
    run.kernels.unlink()
    frozen = yaml.safe_load(run.config.read_text())
    del frozen["kernels"]
    run.config.write_text(yaml.safe_dump(frozen))
    processor(FAST_FUSED)
    command.train("max_steps=20", "run_dir=run", "resume=auto")
    assert run.values()["kernels"]["attention"] == "plain"
    assert not run.values()["kernels"]["measure"]


@pytest.mark.slow
def test_a_kernel_of_the_user_is_used(command, attention_operations):
    with attention_operations() as ran:
        command.train("max_steps=2", "val_every=2", "kernels.attention=fused", "run_dir=run")
    assert "flash" in ran
    with attention_operations() as ran:
        command.train("max_steps=2", "val_every=2", "kernels.attention=plain", "run_dir=other")
    assert not ran


def test_damaged_decisions_are_refused(tmp_path):
    run = RunDirectory(tmp_path)
    run.kernels.write_text('{"settings": {"precision"')
    with pytest.raises(UserError, match=r"kernels\.json is damaged; restore it, or delete it"):
        run.decisions()
