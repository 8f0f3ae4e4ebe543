"""Models and batches that this machine's memory can't hold are refused before ranks start."""

import pytest

from lockstep_gpt.config_files import yaml_files
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch import host_memory
from lockstep_gpt.launch.placement import Placement
from lockstep_gpt.model.model_settings import build_gpt
from lockstep_gpt.training.schedule import plan_batch

ABSURD = {
    "model.n_embd=2000000000": "model.n_embd=2000000000 and model.n_layer=2 make at least 80,000,0",
    "batch.global_size=1000000000": "batch.micro_size=1000000000 and model.block_size=32 make 32,0",
    "model.block_size=100000000000": "batch.micro_size=8 and model.block_size=100000000000 make 80",
}


@pytest.mark.parametrize("setting", ABSURD)
def test_an_absurd_size_is_one_line_and_leaves_no_run(command, setting):
    err = command.train("run_dir=run", setting, status=2).stderr
    assert ABSURD[setting] in err
    assert "GiB for each of 1 rank, but this machine has " in err
    assert err.count("\n") == 1
    assert not (command.folder / "run").exists()


def refuse_on(config, ranks, accelerator="cpu"):
    batch = plan_batch(config.batch, config.model.block_size, ranks, 1)
    host_memory.refuse_too_large(config, Placement(accelerator, ranks, 1), batch)


@pytest.mark.parametrize("name", ["modern_nano", "nano"])
def test_the_real_weights_are_more_than_those_that_count(composed, name):
    assert name in yaml_files("model")
    config = composed("experiment=smoke", f"model={name}", "model.n_layer=8", "model.n_embd=256")
    weights = build_gpt(config.model, 257).num_parameters
    assert 0.5 * weights < host_memory.fewest_weights(config) < weights


def test_each_rank_of_a_machine_needs_its_own_weights(composed, monkeypatch):
    config = composed("experiment=smoke", "batch.global_size=8")
    size = 4 * host_memory.fewest_weights(config)
    monkeypatch.setattr(host_memory, "memory_here", lambda: 3 * size)
    for accelerator in ("cpu", "cuda"):
        refuse_on(config, 2, accelerator)
        with pytest.raises(UserError, match=r"for each of 4 ranks, but this machine has"):
            refuse_on(config, 4, accelerator)


def test_the_size_of_an_architecture_of_one_s_own_is_unknown(composed):
    config = composed("experiment=smoke")
    assert host_memory.fewest_weights(config) > 0
    config.model.architecture = "mine"
    assert host_memory.fewest_weights(config) == 0


def test_a_container_s_limit_and_swap_count(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CONTAINER_LIMIT", tmp_path / "memory.max")
    whole = host_memory.memory_here()
    assert whole > 1 << 28
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.memory_here() == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert host_memory.memory_here() == 1048576
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nSwapTotal:       2 kB\nSwapFree: 1 kB\n")
    assert host_memory.memory_here() == 1048576 + 2048
