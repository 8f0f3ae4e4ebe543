import json
import os
import sys
import time

import pytest
from lockstep_gpt import CONFIGS, PROJECT

from lockstep import commands as cli
from lockstep.plan.command import OF_GPT2, WORLD_SIZES
from lockstep.plan.experiment import predicted, training_of
from lockstep.plan.hardware import HARDWARE
from lockstep.plan.table import amount, span

PROGRAM = PROJECT.program

SMALL = ["plan", "experiment=smoke", "--devices", "1,2,8"]


@pytest.fixture
def screen(capsys):
    """Run the command in this process; return its exit status, output and errors."""

    def run(*words):
        status = cli.main(list(words))
        return (status, *capsys.readouterr())

    return run


@pytest.mark.slow
def test_a_plan_of_gpt2_xl_takes_a_few_seconds(composed):
    config = composed("model=gpt2_xl")
    started = time.process_time()
    plan = predicted(config, HARDWARE["h100"], WORLD_SIZES, scaling="weak")
    assert time.process_time() - started < 30
    assert [row.batch.world_size for row in plan.rows] == [2**power for power in range(11)]


@pytest.mark.slow
def test_the_table_has_a_line_for_each_number_of_devices(screen):
    status, out, err = screen(*SMALL, "--price", "1.5")
    steps = out.split("one optimizer step, ms\n")[1].splitlines()
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in steps] == ["devices", "1", "2", "8"]
    assert steps[0].split()[-1] == "cost"
    assert len({len(line) for line in steps}) == 1


def test_numbers_of_devices_that_cannot_run_are_left_out_unless_they_are_named(screen):
    words = ["plan", "experiment=smoke", "batch.global_size=12"]
    _, out, _ = screen(*words)
    rows = out.split("one optimizer step, ms\n")[1].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert "a run can't use 8, 16, 32, 64, 128, 256, 512, 1024 devices, which are left" in out
    _, out, _ = screen(*words, "--devices", "2,8")
    assert "8 devices: batch.global_size=12 is not divisible by 8 devices x 1 node = 8" in out
    _, out, _ = screen(*words, "--scaling", "weak")
    assert "left out" not in out


def test_the_output_names_assumptions_and_sources(screen):
    _, out, _ = screen(*SMALL, "--hardware", "a100-80", "--utilisation", "0.55")
    facts = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert facts["assumed"].startswith("0.55 of the peak in forward and backward")
    assert "is planned with the same utilization. Measure yours" in out
    assert facts["source"] == HARDWARE["a100-80"].source
    assert "the Chinchilla point, 20 per parameter" in facts["tokens"]


def test_json_and_table_tell_the_same(screen):
    plan = json.loads(screen(*SMALL, "--json")[1])
    _, out, _ = screen(*SMALL)
    for row in plan["rows"]:
        assert f"{row['samples_per_second'] * 32:,.0f}" in out
    assert f"{plan['parameters']:,} parameters" in out


def test_flags_change_the_hardware(screen):
    words = ("--intra", "pcie3", "--inter", "1.25", "--adapters", "2", "--per-node", "4")
    hardware = json.loads(screen(*SMALL, *words, "--json")[1])["hardware"]
    assert (hardware["intra"]["name"], hardware["inter"]["bandwidth"]) == ("pcie3", 1.25e9)
    assert (hardware["adapters"], hardware["devices_per_node"]) == (2, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        "--hardware v100",
        "--intra copper",
        "--devices 1,0",
        "--devices many",
        "--scaling up",
        "--tokens -1",
        "--price nan",
        "--utilisation 1.5",
        "--price",
        "model.n_layers=3",
        "model.n_embd=33",
        "precision=bf16-mixed --hardware t4",
        "batch.global_size=-1",
        "~optim",
        "data=text tokenizer=bpe",
    ],
)
def test_a_mistake_fails_in_one_line(screen, wrong):
    status, out, err = screen("plan", "experiment=smoke", *wrong.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{PROGRAM} plan: ")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--gpu h100", "--gpu is not a flag of plan; did you mean --hardware?"),
        ("--hardwar=h100", "--hardwar is not a flag of plan; did you mean --hardware?"),
    ],
)
def test_a_flag_of_another_name_is_answered_with_the_right_one(screen, typed, line):
    assert screen("plan", *typed.split()) == (2, "", f"{PROGRAM} plan: {line}\n")


@pytest.mark.parametrize("name", ["plan", "doctor"])
def test_help_is_one_screen_and_names_every_flag(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


def facts_of(out):
    return dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())


@pytest.fixture
def small_experiments(tmp_path):
    """Three experiments: one with only a shape, one that builds on it, one that chooses data."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    shape = "model:\n  n_layer: 1\n  n_embd: 64\n  n_head: 2\n  block_size: 32\n"
    shape += "batch:\n  global_size: 4\n"
    (folder / "shape.yaml").write_text(f"# @package _global_\nmax_steps: 30\n{shape}")
    (folder / "built.yaml").write_text("# @package _global_\ndefaults:\n  - shape\nseed: 3\n")
    (folder / "chooses.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - override /data: stdlib\nmax_steps: 99\n{shape}"
    )
    return f"--config-dir={tmp_path}"


@pytest.mark.slow
def test_gpt2_means_the_vocabulary_of_gpt2(screen):
    words = ("model=gpt2_xl", "precision=bf16-mixed", "--devices", "1", "--json")
    plan = json.loads(screen("plan", *words)[1])
    assert plan["parameters"] == 1_557_611_200 + 47 * 1600  # with the padding of the head
    assert plan["tokens"]["vocab_size"] == 50_257
    assert "GPT-2's, because model=gpt2_xl is" in plan["tokens"]["vocabulary"]
    assert "(256 with data=stdlib)" in plan["tokens"]["vocabulary"]


SHAPE = ("model.n_layer=1", "model.n_embd=64", "model.n_head=2", "model.block_size=32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "size"),
    [
        (["model=gpt2", *SHAPE], 50_257),
        (["model=gpt2", *SHAPE, "data=stdlib"], 256),
        (["model=gpt2", *SHAPE, "val_tokens=4096"], 256),
        (["model=gpt2", *SHAPE, "data=synthetic", "data.source.vocab_size=999"], 999),
        (["model=nano"], 256),
        (["model=gpt2", "experiment=shape"], 50_257),
        (["model=gpt2", "experiment=built"], 50_257),
        (["model=gpt2", "experiment=chooses"], 256),
    ],
)
def test_data_that_are_chosen_decide_the_vocabulary(screen, small_experiments, words, size):
    _, out, _ = screen("plan", *words, small_experiments, "--devices", "1")
    assert f"vocabulary of {size:,}," in out
    assert ("GPT-2's" in facts_of(out)["vocabulary"]) == (size == 50_257)


@pytest.mark.slow
def test_presets_have_the_size_of_their_name_with_that_vocabulary(composed):
    named = {"gpt2": 124, "gpt2_medium": 355, "gpt2_large": 774, "gpt2_xl": 1558}
    for preset in OF_GPT2:
        config = composed(f"model={preset}")
        millions = training_of(config, 50_257).parameters / 1e6
        if preset in named:
            assert round(millions) == named[preset]
        else:  # without its own head
            millions -= 50_257 * config.model.n_embd / 1e6
            size = {"modern_124m": 124, "modern_350m": 350, "modern_1b": 1200}[preset]
            assert millions == pytest.approx(size, rel=0.02), preset
    presets = {path.stem for path in (CONFIGS / "model").glob("*.yaml")}
    assert presets > OF_GPT2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "tokens", "source"),
    [
        (["experiment=smoke"], 20 * 8 * 32, "max_steps=20 of 256 tokens"),
        (["experiment=smoke", "max_steps=7"], 7 * 8 * 32, "max_steps=7 of 256 tokens"),
        (["experiment=smoke", "--tokens", "1e6"], 1e6, "by --tokens"),
        (
            ["max_steps=10", "schedule.warmup=1", "batch.global_size=3"],
            10 * 3 * 64,
            "max_steps=10 of 192 tokens",
        ),
        (["experiment=built", "batch.global_size=3"], 30 * 3 * 32, "max_steps=30 of 96 tokens"),
        (["experiment=chooses", "model=nano"], 99 * 4 * 32, "max_steps=99 of 128 tokens"),
        ([], None, ""),
    ],
)
def test_a_given_budget_is_planned(screen, small_experiments, words, tokens, source):
    words = ("plan", *words, small_experiments, "--devices", "1", "--price", "1")
    _, out, _ = screen(*words)
    plan = json.loads(screen(*words, "--json")[1])
    planned = plan["samples"] * plan["tokens"]["per_sample"]
    assert planned == pytest.approx(tokens or 20 * plan["parameters"])
    assert plan["tokens"]["budget"] == source
    line = facts_of(out)["tokens"]
    assert line.startswith(f"{amount(planned)}, {source or 'the Chinchilla point'}")
    row = plan["rows"][0]
    assert row["seconds"] == pytest.approx(plan["samples"] / row["samples_per_second"])


@pytest.mark.slow
def test_a_recipe_is_planned_with_its_own_tokens(screen):
    plan = json.loads(screen("plan", "experiment=gpt2_124m", "--devices", "1", "--json")[1])
    assert plan["samples"] == 4768 * 512  # of 1024 tokens: 2.5 billion, as its comment states
    assert plan["parameters"] == 124_439_808 + 47 * 768  # with the padding of the head


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0051, "5.1 ms"),
        (0.51, "510 ms"),
        (0.000001, "0.01 ms"),
        (12, "12 s"),
        (99, "99 s"),
        (300, "5 min"),
        (5400, "90 min"),
        (7560, "2.1 h"),
        (3 * 86_400, "3.0 days"),
        (400 * 86_400, "400 days"),
    ],
)
def test_durations_have_readable_units(seconds, text):
    assert span(seconds) == text


def test_numbers_have_readable_units():
    assert [amount(5120), amount(2.5e9), amount(1.1e12)] == ["5,120", "2.5 billion", "1.1 trillion"]


def test_no_figure_of_the_table_is_in_powers_of_ten(screen):
    _, out, _ = screen("plan", "experiment=smoke", "--price", "2", "lr_scaling=none")
    assert "e-" not in out.split("one optimizer step, ms\n")[1]


def test_a_reader_who_has_seen_enough_ends_the_command_quietly(capfd, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1, encoding="utf-8") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        status = cli.main(SMALL)
    assert status == 128 + 13  # as of `yes | head -1` in bash
    assert capfd.readouterr().err == ""


def test_the_requested_strategy_is_planned(screen):
    _, out, _ = screen(*SMALL, "strategy=fsdp2")
    facts = facts_of(out)
    assert "gathers each block" in facts["fsdp2"]
    assert "all-reduce" not in out.split("one optimizer step, ms\n")[1]
    assert "gather+scatter" in out
    assert "planned as ddp" not in out


def test_assumptions_on_nccl_and_omissions_are_printed(screen):
    _, out, _ = screen(*SMALL)
    facts = facts_of(out)
    assert "a ring" in facts["algorithm"]
    assert "double tree" in facts["algorithm"]
    assert "a device's nvlink4, or all 8 x ndr of a node" in facts["bottleneck"]
    above = out.split("one optimizer step, ms\n")[0]
    assert "Efficiency counts only the time that ranks wait for links" in above


def test_a_plan_of_gpus_for_a_run_on_the_cpu_says_so(screen):
    words = ("plan", "experiment=smoke", "--devices", "1")
    note = "trainer=cpu, but this plan is for h100; for this machine: doctor --save-profile"
    assert note in screen(*words, "trainer=cpu")[1]
    assert note not in screen(*words, "trainer=gpu")[1]


OWN = """
from torch import nn
from lockstep_gpt.gpt import GPT


class Wide(GPT):
    def __init__(self, vocab_size, block_size, n_layer, n_head, n_embd, times=1):
        super().__init__(vocab_size, block_size, n_layer, n_head, times * n_embd)


class Small(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Fixed(GPT):
    def __init__(self, vocab_size, block_size):
        super().__init__(vocab_size, block_size, 2, 2, 32)
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """Models of an owner, each with a YAML file."""
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
    files = {"Wide": {**sizes, "times": 2}, "Small": {}, "Fixed": {"block_size": 32}}
    (tmp_path / "model").mkdir()
    for name, settings in files.items():
        node = {"_target_": f"own_models.{name}", "_partial_": True, **settings}
        (tmp_path / f"model/{name.lower()}.yaml").write_text(json.dumps(node))
    return ["batch.global_size=8", "max_steps=2", "--devices", "1", f"--config-dir={tmp_path}"]


def test_a_model_of_one_s_own_is_planned_with_its_own_arguments(screen, own_models):
    plan = json.loads(screen("plan", "model=wide", *own_models, "--json")[1])
    same = ("model=gpt", "model.block_size=32", "model.n_layer=2", "model.n_head=2")
    ours = json.loads(screen("plan", *same, "model.n_embd=64", *own_models, "--json")[1])
    assert plan == ours


def test_a_model_needs_no_settings_and_no_names(screen, own_models):
    plan = json.loads(screen("plan", "model=small", "data.block_size=8", *own_models, "--json")[1])
    assert plan["parameters"] == 256 * 16 + 16 * 256 + 256
    assert plan["flops"] == 6 * 8 * 16 * 256  # of the head, for 8 tokens
    fixed = json.loads(screen("plan", "model=fixed", *own_models, "--json")[1])
    assert fixed["tokens"]["per_sample"] == 32


def test_data_without_tokens_are_left_to_python(screen):
    status, out, err = screen("plan", "experiment=smoke", "~data.block_size")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.endswith("call lockstep.plan.predict in Python\n")


def test_a_plan_writes_no_files(screen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("experiment=smoke", "--devices", "1", "run_dir=runs/try")
    assert screen("plan", *words)[0] == 0
    assert screen("plan", "--multirun", *words, "model.n_layer=1,2")[1].count("\nmodel ") == 1
    assert not [*tmp_path.iterdir()]
