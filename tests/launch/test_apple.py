"""Which runs use the GPU of a Mac, and what is rejected there."""

import platform
from dataclasses import replace

import pytest

from lockstep_gpt.config import Config
from lockstep_gpt.distributed.strategies import auto
from lockstep_gpt.errors import UserError
from lockstep_gpt.launch.apple import is_chosen
from lockstep_gpt.launch.devices import Placement, place
from lockstep_gpt.run.run_settings import GuardConfig

MAC = pytest.mark.usefixtures("mac")
AUTO = {"_target_": "lockstep_gpt.distributed.strategies.auto"}


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    for name in ("DISABLE_MPS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def of(accelerator="auto", **settings):
    trainer = {"accelerator": accelerator, "devices": "auto", "num_nodes": 1}
    settings = {"precision": "32-true", **settings}
    return Config(max_steps=1, trainer=trainer, strategy=AUTO, **settings)


@pytest.mark.parametrize("wanted", ["auto", "gpu", "mps"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@MAC
def test_a_mac_s_gpu_is_taken_by_name_and_by_auto(wanted, precision):
    assert place(of(wanted, precision=precision)) == Placement("mps", 1, 1)


@MAC
def test_a_mac_also_trains_on_its_processor():
    config = of("cpu", precision="64-true")
    assert place(replace(config, trainer={**config.trainer, "devices": 2})).accelerator == "cpu"


@pytest.mark.parametrize(
    ("system", "machine", "disabled"),
    [("Linux", "aarch64", "0"), ("Darwin", "x86_64", "0"), ("Darwin", "arm64", "1")],
    ids=["no Mac", "Intel or Rosetta", "DISABLE_MPS"],
)
@MAC
def test_other_machines_have_no_apple_gpu(monkeypatch, system, machine, disabled):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("DISABLE_MPS", disabled)
    assert not is_chosen("auto")
    with pytest.raises(UserError, match=r"^trainer.accelerator=mps but there is no Apple GPU"):
        place(of("mps"))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"precision": "64-true"}, "precision=64-true is not for Apple GPUs; set 32-true or"),
        ({"precision": "16-mixed"}, "precision=16-mixed is not for Apple GPUs; set 32-true or"),
        ({"guard": GuardConfig(max_skipped=1)}, "guard.max_skipped=1 is not for Apple GPUs"),
        ({"compile": True}, "compile=true is not for Apple GPUs, for which Inductor"),
    ],
)
@MAC
def test_unsupported_settings_are_rejected(settings, line):
    with pytest.raises(UserError, match=f"^{line}"):
        place(of(**settings))


@pytest.mark.parametrize(("name", "count"), [("devices", 2), ("num_nodes", 2)])
@MAC
def test_it_is_one_device(name, count):
    config = of()
    with pytest.raises(UserError, match=f"^trainer.{name}=2 but an Apple GPU is one device"):
        place(replace(config, trainer={**config.trainer, name: count}))


@MAC
def test_a_launcher_s_ranks_do_not_share_it(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UserError, match="one device"):
        place(of())


@MAC
def test_a_strategy_for_several_devices_is_rejected():
    with pytest.raises(UserError, match=r"^strategy._target_=\S+ is for several devices, and"):
        place(replace(of(), strategy={"_target_": AUTO["_target_"].replace("auto", "ddp")}))


def test_the_only_rank_computes_on_the_apple_gpu():
    assert str(auto(accelerator="mps", world_size=1).root_device) == "mps:0"


def test_on_other_machines_it_is_rejected_in_one_line(command):
    stderr = command.train("trainer=mps", status=2).stderr
    rule = "but there is no Apple GPU, or DISABLE_MPS=1 is set; set trainer=cpu"
    assert stderr == f"lockstep-gpt train: trainer.accelerator=mps {rule}\n"
