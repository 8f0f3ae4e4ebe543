"""Each rung alone: it resumes where it was, on other ranks, and rejects what it can't do."""

import csv
import itertools

import pytest
import torch

SHORT = ["max_steps=6", "precision=64-true", "schedule.warmup=2"]


def losses(path):
    with path.open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def straight(python, ladder, words, tmp_path_factory):
    """The losses of six steps of rung 1, each with two micro-steps."""
    path = tmp_path_factory.mktemp("straight") / "metrics.csv"
    script = ladder / "single_device.py"
    python(script, *SHORT, *words, "batch.micro_size=4", f"--metrics={path}")
    return losses(path)


@pytest.mark.slow
def test_a_checkpoint_of_one_device_resumes_on_two_manual_ranks(
    python, ladder, words, straight, tmp_path
):
    words = [*SHORT, *words, f"--checkpoint={tmp_path}/state.pt"]
    python(ladder / "single_device.py", *words, "--until=3")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    metrics = tmp_path / "metrics.csv"
    python(
        *[ladder / "ddp_by_hand.py", "--spawn=2", *words],
        *["batch.micro_size=2", f"--metrics={metrics}"],
    )
    assert losses(metrics) == pytest.approx(straight[3:], abs=1e-10)
    ended = torch.load(tmp_path / "state.pt", weights_only=True)
    assert saved["model"].keys() == ended["model"].keys()
    assert not any(name.startswith("module.") for name in ended["model"])


def test_accelerate_resumes_from_its_saved_state(python, ladder, words, straight, tmp_path):
    words = [*SHORT, *words, f"--checkpoint={tmp_path}/state"]
    found = []
    for until in ("--until=3", "--until=6"):
        metrics = tmp_path / f"{until}.csv"
        script = ladder / "ddp_accelerate.py"
        python(script, *words, until, "batch.micro_size=2", f"--metrics={metrics}")
        found += losses(metrics)
    assert found == pytest.approx(straight, abs=1e-10)


@pytest.mark.usefixtures("modules")
def test_a_wrong_setting_fails_in_one_line(monkeypatch, capsys):
    import single_device

    monkeypatch.setattr("sys.argv", ["single_device.py", "optim.lrr=1"])
    with pytest.raises(SystemExit, match="2"):
        single_device.main(single_device.single_device)
    line = "single_device.py: unknown setting optim.lrr; did you mean optim.lr?"
    assert capsys.readouterr().err == f"{line} (+optim.lrr=... would add it)\n"


@pytest.mark.usefixtures("modules")
def test_the_sampler_deals_as_the_order_does_and_reshuffles_each_epoch(words):
    from experiment import load

    from lockstep.loading.order import RankOrder, Shuffled

    experiment = load([*words, "batch.micro_size=2", "batch.global_size=4"], 2)
    size, seed = 8, experiment.config.seed  # a whole number of batches: epochs end with one
    samplers = [experiment.sampler(size, rank, 2) for rank in range(2)]
    orders = [RankOrder(Shuffled(size, seed), 2, rank, 2) for rank in range(2)]
    for epoch, (sampler, order) in itertools.product(range(3), zip(samplers, orders, strict=True)):
        sampler.set_epoch(epoch)
        batches = itertools.islice(order, 2 * epoch, 2 * epoch + 2)
        steps = [places.samples.tolist() for places in batches]
        assert list(sampler) == [*steps[0], *steps[1]]
        assert len(sampler) == 4


def test_a_custom_address_is_rejected_under_a_launcher(python, ladder, words):
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    script = [ladder / "ddp_by_hand.py", "--init-method=tcp://127.0.0.1:29511"]
    done = python(*launch, *script, *words, status=1)
    line = "ddp_by_hand.py: --init-method=tcp://127.0.0.1:29511: torchrun's ranks meet at its own"
    assert line in done.stderr
