import pytest

from lockstep.errors import UserError
from lockstep.launch import devices
from lockstep.launch.devices import Placement, found, gpu_count
from lockstep.launch.launch_settings import LaunchSettings


@pytest.fixture
def fake_gpus(tmp_path, monkeypatch):
    """Make this machine look like one with `count` GPUs, some of which `mask` leaves visible."""

    def look_like(count, mask=None):
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))]:
            (tmp_path / name).touch()
        monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path)
        monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
        for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if mask is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)

    return look_like


def place(trainer):
    return found({"trainer": trainer}, LaunchSettings())


def refusal(trainer):
    with pytest.raises(UserError) as error:
        place(trainer)
    return str(error.value)


@pytest.mark.parametrize(
    ("present", "mask", "visible"),
    [
        (0, None, 0),
        (2, None, 2),
        (4, "0,2", 2),
        (4, " 3 , 1 ", 2),
        (2, "", 0),
        (2, "-1", 0),
        (4, "0,-1,1", 1),
        (2, "GPU-8f2c,GPU-77ab", 2),
        (0, "0", 0),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(fake_gpus, present, mask, visible):
    fake_gpus(present, mask)
    assert gpu_count() == visible


def test_without_device_files_nvidia_smi_is_asked(fake_gpus, tmp_path):
    fake_gpus(0)
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: One (UUID: GPU-1)'\necho 'GPU 1: Two'\n")
    command.chmod(0o755)
    assert gpu_count() == 2


@pytest.mark.parametrize(
    ("gpus", "trainer", "placement"),
    [
        (0, {}, Placement("cpu", 1, 1)),
        (3, {}, Placement("cuda", 3, 1)),
        (3, {"accelerator": "auto", "devices": "auto", "num_nodes": 2}, Placement("cuda", 3, 2)),
        (3, {"accelerator": "gpu", "devices": 2}, Placement("cuda", 2, 1)),
        (3, {"accelerator": "cuda"}, Placement("cuda", 3, 1)),
        (3, {"accelerator": "cpu"}, Placement("cpu", 1, 1)),
        (0, {"accelerator": "cpu", "devices": 64}, Placement("cpu", 64, 1)),
    ],
)
def test_auto_uses_available_devices_and_other_values_are_kept(fake_gpus, gpus, trainer, placement):
    fake_gpus(gpus)
    assert place(trainer) == placement


def test_a_missing_gpu_is_rejected_with_the_mask_that_hides_it(fake_gpus):
    fake_gpus(0)
    without = "needs a GPU, but no GPUs were found; set trainer.accelerator=cpu to run without one"
    assert refusal({"accelerator": "gpu"}) == f"trainer.accelerator=gpu {without}"
    fake_gpus(2, mask="-1")
    assert "no GPUs were found with CUDA_VISIBLE_DEVICES=-1" in refusal({"accelerator": "gpu"})


def test_more_devices_than_gpus_are_rejected_with_the_number_found(fake_gpus):
    fake_gpus(1)
    assert refusal({"devices": 2}) == "trainer.devices=2, but 1 GPU was found; set at most 1"


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ({"devices": 0}, "trainer.devices=0 must be auto or a whole number of at least 1"),
        ({"devices": "abc"}, "trainer.devices=abc must be auto or a whole number"),
        ({"devices": True}, "trainer.devices=true must be auto or a whole number"),
        ({"devices": 1.5}, "trainer.devices=1.5 must be auto or a whole number"),
        (
            {"devices": [0, 2]},
            "trainer.devices=[0, 2] must be auto or a whole number of at least 1; to use these "
            "GPUs: CUDA_VISIBLE_DEVICES=0,2 and trainer.devices=auto",
        ),
        ({"devices": 99_999}, "trainer.devices=99999 must be at most 1024 on one machine"),
        ({"num_nodes": 0}, "trainer.num_nodes=0 must be a whole number of at least 1"),
        ({"num_nodes": "auto"}, "trainer.num_nodes=auto must be a whole number of at least 1"),
        ({"num_nodes": 100_001}, "trainer.num_nodes=100001 must be at most 100000"),
        ({"accelerator": "gpu"}, "trainer.accelerator=gpu needs a GPU, but no GPUs were"),
        ({"accelerator": "tpu"}, "trainer.accelerator=tpu is not one of auto, cpu, gpu, cuda, mps"),
    ],
)
def test_an_impossible_number_is_one_line(fake_gpus, trainer, line):
    fake_gpus(0)
    assert refusal(trainer).startswith(line)


@pytest.mark.parametrize(("text", "devices"), [("2", 2), ("-1", 3), (-1, 3)])
def test_a_number_may_come_as_text_as_from_a_variable(fake_gpus, text, devices):
    fake_gpus(3)
    assert place({"accelerator": "gpu", "devices": text, "num_nodes": 1}).devices == devices


def test_a_mac_s_gpu_is_taken_by_its_name_alone(fake_gpus):
    fake_gpus(0)
    settings = {"devices": "auto", "num_nodes": 1}
    assert place({"accelerator": "mps", **settings}) == Placement("mps", 1, 1)
    assert place({"accelerator": "auto", **settings}).accelerator == "cpu"
