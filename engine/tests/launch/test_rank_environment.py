"""What libraries of agent and ranks read at load: our values, unless the user has set others."""

import os
import subprocess
import sys

import pytest

from lockstep.launch.launch_settings import LaunchSettings
from lockstep.launch.placement import Launch, Placement
from lockstep.launch.supervise import rank_environment

NAMES = (
    "OMP_NUM_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def ours(accelerator="cuda"):
    environment = rank_environment(Launch(Placement(accelerator, 4, 1), LaunchSettings()))
    return {name: environment[name] for name in NAMES if name in environment}


def test_ranks_share_the_cores_also_to_compile():
    assert ours("cpu") == {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}


def test_segments_grow_on_gpus_alone():
    assert ours()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in ours("cpu")


@pytest.mark.parametrize("name", NAMES)
def test_the_user_s_value_stays(name, monkeypatch):
    monkeypatch.setenv(name, "mine")
    both = ours("cpu") | ours()
    assert both[name] == "mine"


def test_the_old_name_of_the_allocator_s_settings_is_the_user_s_too(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert "PYTORCH_ALLOC_CONF" not in ours()


@pytest.mark.parametrize(("before", "after"), [(None, "10000"), ("7", "7")])
def test_threads_spin_shortly_since_the_package_is_imported(before, after, monkeypatch):
    """It sets the variable before torch loads the library that reads it."""
    shown = "os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules"
    code = f"import os, sys, lockstep_gpt; print({shown})"
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if before is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", before)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{after} False\n"
