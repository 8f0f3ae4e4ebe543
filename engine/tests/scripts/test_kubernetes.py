"""The manifests, read with the API's own types, and the script that their pods run."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob
from kubernetes import client

FOLDER = Path(__file__).parents[3] / "scripts/kubernetes"
SCRIPT = FOLDER / "train.sh"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text("utf-8")))


def typed(document, kind):
    """Read a document as the API client does."""
    response = json.dumps(document)
    return client.ApiClient().deserialize(response, kind, "application/json")


def as_sent(value):
    return client.ApiClient().sanitize_for_serialization(value)


@pytest.fixture(scope="module")
def job():
    service, _, job = documents("job.yaml")
    return SimpleNamespace(service=typed(service, "V1Service"), job=typed(job, "V1Job"))


def test_the_api_s_types_know_every_field_of_the_job():
    service, policy, job = documents("job.yaml")
    assert as_sent(typed(service, "V1Service")) == service
    assert as_sent(typed(policy, "V1NetworkPolicy")) == policy
    assert as_sent(typed(job, "V1Job")) == job


@pytest.mark.parametrize(
    ("name", "label"),
    [("job.yaml", "job-name"), ("trainjob.yaml", "jobset.sigs.k8s.io/jobset-name")],
)
def test_only_the_run_s_own_pods_reach_its_ports(name, label):
    *_, policy, run = documents(name)
    spec = typed(policy, "V1NetworkPolicy").spec
    assert spec.pod_selector.match_labels == {label: run["metadata"]["name"]}
    (rule,) = spec.ingress
    assert [peer.pod_selector for peer in rule._from] == [spec.pod_selector]
    assert spec.policy_types == ["Ingress"]


def test_an_unknown_api_field_is_detected():
    *_, job = documents("job.yaml")
    *_, train = documents("trainjob.yaml")
    job["spec"]["completionsMode"] = train["spec"]["nodes"] = "Indexed"
    assert as_sent(typed(job, "V1Job")) != job
    assert TrainJob.from_dict(train).to_dict() != train


def test_pods_of_the_job_meet_at_the_first_through_the_service(job):
    name, spec = job.job.metadata.name, job.job.spec
    pod = spec.template.spec
    assert job.service.spec.cluster_ip == "None"
    assert job.service.spec.selector == {"job-name": name}
    assert pod.subdomain == job.service.metadata.name
    nodes, _, endpoint, *_ = pod.containers[0].args
    assert int(nodes) == spec.completions == spec.parallelism
    port = job.service.spec.ports[0].port
    assert endpoint == f"{name}-0.{pod.subdomain}:{port}"


def test_a_pod_has_time_to_save_before_it_is_killed(job):
    words = job.job.spec.template.spec.containers[0].args
    (grace,) = (float(word.split("=")[1]) for word in words if word.startswith("launch.grace"))
    assert grace < job.job.spec.template.spec.termination_grace_period_seconds


def test_the_api_s_types_know_every_field_of_the_train_job():
    *_, document = documents("trainjob.yaml")
    assert TrainJob.from_dict(document).to_dict() == document


def test_the_train_job_runs_the_job_s_command(job):
    *_, document = documents("trainjob.yaml")
    trainer, container = TrainJob.from_dict(document).spec.trainer, job.job.spec.template.spec
    assert trainer.command == container.containers[0].command
    assert trainer.args[3:] == container.containers[0].args[3:]


@pytest.mark.slow
def test_a_replaced_pod_resumes_the_first_one_s_run(command, wait_for, python_of_forks):
    pod = [str(SCRIPT), "1", "0", "localhost:29500", "run"]
    words = command.smoke("trainer=cpu", "max_steps=100000")[1:]
    program = f"{python_of_forks} -m lockstep_gpt"
    for step in (20, 40):
        process = command.start_words([*pod, *words], TRAIN_COMMAND=program)
        folder = command.folder / "run/checkpoints"
        wait_for(lambda: any(path.stem >= f"step={step:06d}" for path in folder.glob("*.ckpt")))  # noqa: B023
        process.terminate()
        out, err = process.communicate(timeout=240)
        assert process.returncode == 128 + signal.SIGTERM, err
    assert "resuming run" in out
