import json
import subprocess
import sys

import torch

from lockstep import project
from lockstep.callbacks.environment import environment
from lockstep.project import Project


def test_a_run_records_its_environment(finished):
    noted = json.loads((finished[0].folder / "runs/first/environment.json").read_text())
    assert noted["torch"] == torch.__version__
    assert noted["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_noted_revision_is_of_the_project_wherever_the_engine_and_the_user_are(
    tmp_path, monkeypatch
):
    ours = tmp_path / "ours"
    words = ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "--allow-empty", "-m"]
    subprocess.check_call(["git", "init", "-q", ours])
    subprocess.check_call(["git", *words, "first"], cwd=ours)
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ours, text=True).strip()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project, "_begun", [])
    project.begin(Project("p", None, "1", configs=ours, train=""))
    assert environment(torch.device("cpu"))["git_revision"] == revision
