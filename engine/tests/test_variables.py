"""Environment variables that act on a run unseen: refused, dropped, or shown."""

import json
import re
import socket

import pytest

from lockstep import variables
from lockstep.errors import UserError

PRESENT = [(1, "lo"), (2, "eth0"), (3, "ib0")]


@pytest.fixture(autouse=True)
def _three_interfaces(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: PRESENT)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def refuse(accelerator="cuda", devices=2):
    variables.refuse_absent_interfaces(accelerator, devices)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "nosuch0"),
        ("GLOO_SOCKET_IFNAME", "eth"),  # gloo takes no beginnings
        ("GLOO_SOCKET_IFNAME", "eth0,nosuch0"),
        ("NCCL_SOCKET_IFNAME", "nosuch0"),
        ("NCCL_SOCKET_IFNAME", "=eth"),
    ],
)
def test_an_absent_interface_is_refused_with_those_that_exist(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError) as error:
        refuse()
    assert str(error.value) == (
        f"{variable}={value} is not a network interface of this machine, which has eth0, ib0, lo; "
        f"set one of them, or: unset {variable}"
    )
    refuse(devices=1)  # connects to nobody


@pytest.mark.parametrize("value", ["eth0", "eth0,ib0", "eth0:1", ""])
def test_gloo_s_own_forms_are_allowed(value, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    refuse()


@pytest.mark.parametrize(
    "value", ["eth", "=eth0", "nosuch,ib", "=nosuch0,ib0", "^docker", "^=nosuch0", "eth0:5000", ""]
)
def test_nccl_s_own_forms_are_allowed(value, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    refuse()


def test_nccl_s_interfaces_do_not_matter_on_cpus(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    refuse("cpu")


def test_the_command_refuses_before_it_creates_the_run(command):
    words = command.smoke("trainer=cpu", "trainer.devices=2", "run_dir=run")
    done = command(*words, status=2, GLOO_SOCKET_IFNAME="nosuch0")
    line = "GLOO_SOCKET_IFNAME=nosuch0 is not a network interface of this machine, which has "
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (command.folder / "run").exists()


def test_an_argument_of_the_trainer_by_variable_is_refused_with_the_setting():
    with pytest.raises(UserError) as error:
        variables.settle({"PL_TRAINER_LIMIT_TRAIN_BATCHES": "2", "PL_TRAINER_DEVICES": ""})
    assert str(error.value) == (
        "PL_TRAINER_LIMIT_TRAIN_BATCHES=2 would set an argument of Lightning's Trainer, and the "
        "run's configuration would not show it; write trainer.limit_train_batches=2 (with a + "
        "before it if your configuration lacks it), and: unset PL_TRAINER_LIMIT_TRAIN_BATCHES"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PL_GLOBAL_SEED", "7"),
        ("PL_SEED_WORKERS", "1"),
        ("MPLBACKEND", "module://of_no_notebook.here"),
        ("MPLBACKEND", "bad"),
        ("MPLBACKEND", ""),
        ("LOGLEVEL", "debug"),
        ("LOGLEVEL", "10"),
    ],
)
def test_a_variable_of_another_program_is_dropped(variable, value):
    given = {variable: value, "HOME": "/root"}
    variables.settle(given)
    assert given == {"HOME": "/root"}


@pytest.mark.parametrize("name", ["Agg", "svg", "TkAgg", "module://json.tool"])
def test_a_backend_that_matplotlib_finds_is_kept(name):
    given = {"MPLBACKEND": name}
    variables.settle(given)
    assert given == {"MPLBACKEND": name}


def test_a_level_that_python_knows_is_kept():
    given = {"LOGLEVEL": "DEBUG"}
    variables.settle(given)
    assert given == {"LOGLEVEL": "DEBUG"}


def test_the_names_of_backends_are_matplotlib_s():
    registry = pytest.importorskip("matplotlib.backends.registry", reason="of the extra cluster")
    names = registry.backend_registry.list_all()
    assert [name for name in names if not variables.is_backend(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_ALGO",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "ONEDNN_DEFAULT_FPMATH_MODE",
        "ATEN_CPU_CAPABILITY",
        "MKL_CBWR",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "TORCH_COMPILE_DISABLE",
    ],
)
def test_what_can_change_the_last_bits_is_shown(name):
    assert variables.shown({name: "1", "HOME": "/root", "NCCL_DEBUG": "INFO"}) == {name: "1"}


@pytest.mark.slow
def test_the_receipt_and_the_environment_of_a_run_have_them(command):
    words = command.smoke("trainer=cpu", "trainer.devices=2", "run_dir=run", "max_steps=2")
    done = command(*words, ATEN_CPU_CAPABILITY="default", MPLBACKEND="module://of_no_notebook.here")
    assert re.search(r"^  variables +ATEN_CPU_CAPABILITY=default$", done.stdout, re.MULTILINE)
    written = json.loads((command.folder / "run/environment.json").read_text("utf-8"))
    assert written["variables"] == {"ATEN_CPU_CAPABILITY": "default"}


def test_the_command_refuses_an_argument_by_variable_before_it_creates_the_run(command):
    words = command.smoke("trainer=cpu", "trainer.devices=2", "run_dir=run")
    done = command(*words, status=2, PL_TRAINER_FAST_DEV_RUN="1")
    assert "PL_TRAINER_FAST_DEV_RUN=1 would set an argument" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (command.folder / "run").exists()


def test_a_variable_that_torchrun_left_in_a_shell_ends_nothing(command):
    assert "usage" in command("train", "--help", TORCHELASTIC_RUN_ID="none").stdout


def test_a_level_of_debugging_that_crashes_torch_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    for accelerator, size in (("cpu", 1), ("cuda", 2)):
        variables.refuse_crash(accelerator, size)
    with pytest.raises(UserError) as error:
        variables.refuse_crash("cpu", 2)
    assert str(error.value) == (
        "TORCH_DISTRIBUTED_DEBUG=DETAIL ends ranks on CPUs with SIGSEGV, in torch's own code; "
        "run: export TORCH_DISTRIBUTED_DEBUG=INFO"
    )
