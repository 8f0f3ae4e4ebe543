"""Runs at the same time have the devices that one run has, and its results."""

from __future__ import annotations

import os

import pytest

from lockstep.errors import UserError
from lockstep.evidence import workers
from lockstep.evidence.workers import environments_of
from lockstep.launch import devices
from lockstep.launch.placement import Placement


@pytest.fixture
def machine(monkeypatch):
    """Let the machine have some cores and GPUs, and the user's variables."""

    def make(cores=8, gpus=0, **variables):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
        monkeypatch.setattr(devices, "gpu_count", lambda: gpus)
        for name in (workers.THREADS, workers.VISIBLE):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


def test_a_run_has_all_cores_unless_the_user_chose_fewer_threads(machine):
    machine(cores=8)
    assert environments_of(Placement("cpu", 2, 1), None) == [{"OMP_NUM_THREADS": "4"}]
    assert environments_of(Placement("cpu", 2, 1), 2) == [{"OMP_NUM_THREADS": "2"}] * 2
    machine(cores=8, OMP_NUM_THREADS="2")
    assert environments_of(Placement("cpu", 1, 1), None) == [{"OMP_NUM_THREADS": "2"}] * 4


def test_gpus_are_shared_among_runs_that_fit(machine):
    machine(gpus=8)
    assert environments_of(Placement("cuda", 8, 1), None) == [{}]
    assert environments_of(Placement("cuda", 3, 1), None) == [
        {"CUDA_VISIBLE_DEVICES": "0,1,2"},
        {"CUDA_VISIBLE_DEVICES": "3,4,5"},
    ]
    machine(gpus=2, CUDA_VISIBLE_DEVICES="5,7")
    assert environments_of(Placement("cuda", 1, 1), None) == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]


def test_more_runs_than_fit_are_refused(machine):
    machine(gpus=4)
    with pytest.raises(UserError, match=r"^--at-once=3 runs don't fit: 4 GPUs, 2 for a run; "):
        environments_of(Placement("cuda", 2, 1), 3)
    with pytest.raises(UserError, match="on one machine"):
        environments_of(Placement("cuda", 2, 2), None)
