"""Tasks of plain `srun` become ranks; a real SLURM runs them in tests/scripts/test_slurm.py."""

import os

import pytest

from lockstep.errors import UserError
from lockstep.launch import slurm
from lockstep.launch.launch_settings import LaunchSettings

TASK = {
    "SLURM_JOB_ID": "812",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "localhost,n[3-4]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
SETTINGS = LaunchSettings()


@pytest.fixture
def task(monkeypatch):
    """Make this process a task of srun, with some variables changed."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "")

    def start(**changed):
        for name, value in {**TASK, **changed}.items():
            monkeypatch.setenv(name, value)

    return start


def test_a_task_of_srun_gets_its_place_among_all(task):
    task()
    slurm.become_rank(SETTINGS)
    place = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20_000 + (81_200 + 3) % 20_000)}
    assert {name: os.environ[name] for name in place} == place


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({"SLURM_STEP_NUM_TASKS": "1"}, LaunchSettings()),  # a shell, for example
        ({"RANK": "2"}, LaunchSettings()),
        ({}, LaunchSettings(rdzv_endpoint="n3:29500")),  # each task has an agent
    ],
)
def test_other_processes_in_a_job_keep_their_environment(task, changed, settings):
    task(**changed)
    slurm.become_rank(settings)
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2,1", [2, 1]), ("4(x3),2(x2)", [4, 4, 4, 2, 2])]
)
def test_the_short_form_of_tasks_is_understood(text, counts):
    assert slurm.tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[07-09,12],cpu1", "gpu07"), ("n3,n4", "n3"), ("a-b-[1,4]", "a-b-1")],
)
def test_the_first_of_several_machines_is_found(monkeypatch, nodes, host):
    monkeypatch.setattr(slurm.socket, "getaddrinfo", lambda *_: [])
    assert slurm.first_host(nodes, 2) == host
    assert slurm.first_host(nodes, 1) == "127.0.0.1"


def test_what_cannot_work_is_rejected_in_one_line(task):
    task(SLURM_STEP_TASKS_PER_NODE="4,2(x2)")
    with pytest.raises(UserError, match=r"^srun started 4, 2, 2 tasks on its machines; start equ"):
        slurm.become_rank(SETTINGS)
    task(SLURM_STEP_TASKS_PER_NODE="4(x2)", SLURM_STEP_NODELIST="no-such-host.invalid,n2")
    with pytest.raises(UserError, match=r"^srun's first machine no-such-host.invalid cannot be"):
        slurm.become_rank(SETTINGS)
