from datetime import timedelta

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from lockstep_gpt.config_files import config_folder
from lockstep_gpt.distributed.exact_sums import SingleDeviceStrategy
from lockstep_gpt.distributed.strategies import auto, ddp

PRESETS = config_folder() / "strategy"
SETTINGS = {"process_group_backend": None, "timeout_seconds": 90, "comm_hook": "none"}


def test_auto_does_not_wrap_one_rank():
    cpu = auto(accelerator="cpu", world_size=1, **SETTINGS)
    gpu = auto(accelerator="cuda", world_size=1, **SETTINGS)
    assert type(cpu) is type(gpu) is SingleDeviceStrategy
    assert (cpu.root_device, gpu.root_device) == (torch.device("cpu"), torch.device("cuda", 0))


def test_auto_chooses_ddp_for_more_than_one_rank():
    strategy = auto(accelerator="cpu", world_size=2, **SETTINGS)
    assert isinstance(strategy, DDPStrategy)
    assert strategy._timeout == timedelta(seconds=90)


def test_ddp_wraps_one_rank_too_and_uses_the_requested_backend():
    settings = {**SETTINGS, "process_group_backend": "mpi"}
    strategy = ddp(**settings, bucket_cap_mb=7)
    assert isinstance(strategy, DDPStrategy)
    assert strategy._process_group_backend == "mpi"
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 7}


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp2"])
def test_every_setting_of_our_presets_is_taken(name):
    preset = OmegaConf.merge(
        OmegaConf.load(PRESETS / "ddp.yaml"), OmegaConf.load(PRESETS / f"{name}.yaml")
    )
    settings = {key: preset[key] for key in preset if key not in ("_target_", "defaults")}
    strategy = ddp(**settings)
    assert strategy._ddp_kwargs["gradient_as_bucket_view"] is True
    assert strategy.comm_hook is None
