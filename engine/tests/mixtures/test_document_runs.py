"""Real runs with packed windows and documents that don't see each other."""

import csv
import json
import math
from importlib.util import find_spec

import pytest
import torch
from lockstep_gpt.trained_model import load_model

from lockstep.mixtures.mask import Documents
from lockstep.mixtures.whole_documents import folder_within
from lockstep.run.directory import RunDirectory

PACKED = ["packing=documents", "callbacks=[default,documents]"]


def losses(command, run):
    with (command.folder / run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row[name]) for row in rows if row[name]] for name in ("train/loss", "val/loss")
    }


@pytest.fixture
def lines(tmp_path):
    """Return a folder of 300 documents; with T = 32, some are shorter and some are longer."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"{number} squared is {number**2}\n" * (number % 4))
    return folder


def words_for(lines):
    source = ["data=text", f"data.source.path={lines}", "data.source.val_fraction=0.2"]
    return [*source, *PACKED, "schedule.warmup=0"]


@pytest.mark.slow
def test_ranks_accumulation_and_resume_train_the_same_run(command, lines):
    words = [*words_for(lines), "max_steps=12", "val_every=4", "checkpoint.every=4"]
    out = command.train(*words, "log_every=4", "run_dir=one").stdout
    assert "documents in " in out
    assert "padding, no token lost" in out
    assert "have no text, only their end, which is kept" in out
    two = ["trainer=cpu", "trainer.devices=2", "batch.micro_size=2", "batch.global_size=8"]
    command.train(*words, "log_every=4", *two, "run_dir=two")
    one, other = losses(command, "one"), losses(command, "two")
    for name, values in one.items():
        assert values == pytest.approx(other[name], rel=1e-3)
    command("train", "run_dir=two", "resume=auto", "max_steps=14", "schedule.decay=constant")
    assert command.summary("two")["step"] == 14


@pytest.mark.slow
def test_ranks_that_split_a_model_see_the_same_documents(command, lines):
    words = [*words_for(lines), "max_steps=8", "val_every=4", "log_every=4", "batch.micro_size=2"]
    split = ["trainer=cpu", "trainer.devices=4", "strategy=fsdp2", "strategy.tensor_parallel=2"]
    command.train(*words, "run_dir=one")
    command.train(*words, *split, "run_dir=split")
    one, other = losses(command, "one"), losses(command, "split")
    for name, values in one.items():
        assert values == pytest.approx(other[name], abs=1e-5)


@pytest.mark.slow
def test_the_panel_of_a_packed_run_records_the_norms_of_the_log(command, lines):
    if find_spec("lockstep.pages") is None:
        pytest.skip("the panel is an extra of its own, pages")
    panel = ["callbacks=[default,documents,sync_panel]", "callbacks.sync_panel.every=3"]
    words = [*words_for(lines), *panel, "batch.micro_size=2", "max_steps=6", "log_every=3"]
    command.train(*words, "run_dir=run")
    with (command.folder / "run/metrics.csv").open() as file:
        logged = {row["trainer/step"]: row["optim/grad_norm"] for row in csv.DictReader(file)}
    for step in ("3", "6"):
        path = command.folder / f"run/sync/step={step:0>6}.json"
        parameters = json.loads(path.read_text())["parameters"]
        norm = math.hypot(*(parameter["mean_norm"] for parameter in parameters))
        assert norm == pytest.approx(float(logged[step]), rel=1e-5)


@pytest.mark.slow
def test_a_masked_run_resumes_and_generates_the_same_bits(command, lines):
    words = [*words_for(lines), "max_steps=8", "val_every=4", "checkpoint.every=4"]
    command.train(*words, "checkpoint.keep_last=2", "run_dir=run")
    run = command.folder / "run"
    weights = command.summary("run")["weights"]
    prompt = ("generate", "run", "--prompt", "1 squared", "--length", "20")
    text = command(*prompt).stdout
    ids = torch.tensor([[*b"a\0b\0c"]])
    masked = load_model(run / "checkpoints/step=000008.ckpt")[0]
    assert isinstance(masked.positions.__self__, Documents)
    torch.testing.assert_close(masked(ids)[0, -1], masked(ids[:, -1:])[0, -1])
    for path in run.glob("checkpoints/step=000008*"):
        path.unlink()
    (run / "summary.json").unlink()
    command("train", "run_dir=run", "resume=auto")
    assert command.summary("run")["weights"] == weights
    assert command(*prompt).stdout == text


@pytest.mark.slow
def test_sums_in_one_order_have_equal_bits_with_padding(command, lines):
    words = [*words_for(lines), "max_steps=4", "batch.exact_micro_size=2", "checkpoint.every=2"]
    command.train(*words, "run_dir=one")
    command.train(*words, "trainer=cpu", "trainer.devices=2", "run_dir=two")
    one, two = (command.summary(run)["weights"] for run in ("one", "two"))
    assert one == two


def test_the_windows_are_packed_before_ranks_start_and_only_once(command, lines):
    out = command("prepare", *words_for(lines)).stdout
    assert out.count("packed ") == 1
    out = command("prepare", *words_for(lines)).stdout
    assert "packed " not in out


def test_a_kept_packing_cannot_change_on_resume(command, lines):
    command.train(*words_for(lines), "max_steps=4", "run_dir=run")
    change = ["train", "run_dir=run", "resume=auto", "max_steps=6"]
    stream = "packing._target_=lockstep.tokens.prepared.Stream"
    output = command.train(*words_for(lines), "packing=stream", *change[1:], status=2).stderr
    assert f"{stream} instead of " in output
    assert stream in command(*change, stream, status=2).stderr
    output = command(*change, "documents.mask=false", status=2).stderr
    assert "documents.mask=" in output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["packing=best"], "packing=best is not one of documents, stream"),
    ],
)
def test_wrong_values_are_refused_in_one_line(command, words, error):
    assert error in command("train", "experiment=smoke", *words, status=2).stderr


@pytest.mark.slow
def test_data_without_documents_is_refused_and_leaves_no_run(command):
    words = ["experiment=smoke", "data=synthetic", "data.source.tokens=20000", "run_dir=none"]
    for setting in PACKED:
        output = command("train", *words, setting, status=2).stderr
        assert output.splitlines()[-1].endswith("no end of text; leave it out")
        assert f"{setting.replace('[default,documents]', 'documents')} needs documents" in output
    assert not (command.folder / "none").exists()


def test_a_damaged_packing_is_one_line_before_ranks_start(command, lines):
    command.train(*words_for(lines), "max_steps=4", "run_dir=run")
    tokens = RunDirectory(command.folder / "run").notes()["tokens"]
    packed = folder_within(command.data_root / f"text-{tokens['fingerprint'][:8]}", 32)
    words = [*words_for(lines), "max_steps=4", "run_dir=again"]
    for name, place in (("index.json", b"windows"), ("train-starts.npy", b"shape")):
        content = (packed / name).read_bytes()
        (packed / name).write_bytes(content.replace(place, place.upper()))
        output = command.train(*words, status=2).stderr
        (packed / name).write_bytes(content)
        assert f"{packed} is damaged" in output
        assert "; delete that folder, and start again" in output
        assert output.count("\n") == 1
        assert not (command.folder / "again").exists()
