import json
import math
import subprocess

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lockstep_gpt.trained_model import load_model

from lockstep import commands as cli
from lockstep.checkpoints.reading import find_checkpoint
from lockstep.errors import UserError
from lockstep.evaluation.measure import of_text
from lockstep.tokens.tokenizer import ByteTokenizer

T = 64


@pytest.fixture(scope="module")
def model(saved_run):
    return load_model(find_checkpoint(saved_run(ByteTokenizer())))[0]


@torch.inference_mode()
def loss_by_hand(model, text):
    """The mean over all targets in windows of at most T tokens, one by one, in float64."""
    ids = torch.from_numpy(np.frombuffer(text + b"\0", np.uint8).astype(np.int64))
    losses = []
    for start in range(0, len(ids) - 1, T):
        window = ids[start : start + T + 1]
        logits = model(window[None, :-1])[0].double()
        losses += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    return math.fsum(losses) / len(losses), len(losses)


@pytest.mark.parametrize("length", [1, T - 1, T, T + 1, 5 * T + 7])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_every_token_of_a_text_of_any_length_counts_once(tmp_path, model, length, batch_size):
    text = (b"the quick brown fox " * 99)[:length]
    (tmp_path / "a.txt").write_bytes(text)
    with torch.inference_mode():
        result = of_text(model, ByteTokenizer(), str(tmp_path / "a.txt"), batch_size, T)
    loss, count = loss_by_hand(model, text)
    assert result["tokens"] == count == length
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(loss / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({}, r"--data=\S+ matches no file; give a file, folder or glob"),
        ({"a.txt": b"\0\1"}, r"a\.txt is not text: it has NUL bytes"),
        ({"a.txt": b""}, r"--data=\S+ has no text; give a file or a folder with some"),
    ],
)
def test_what_is_no_text_is_one_clear_line(tmp_path, model, files, line):
    (tmp_path / "texts").mkdir()
    for name, content in files.items():
        (tmp_path / "texts" / name).write_bytes(content)
    with pytest.raises(UserError, match=line):
        of_text(model, ByteTokenizer(), str(tmp_path / "texts"), 8, T)


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """A run that has a test split, and what it printed."""
    folder = tmp_path_factory.mktemp("tested")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"{number} of forty texts, in words. " * 90)
    words = ["train", "experiment=smoke", "data=text", f"data.source.path={texts}"]
    words += [
        "data.source.val_fraction=0.3",
        "data.source.test_fraction=0.3",
        "trainer=cpu",
        "logger=none",
    ]
    words += ["launch.inline=true", "callbacks.sample.length=9"]
    words += [f"data.root={folder / 'data'}", f"run_dir={folder / 'run'}"]
    assert cli.main(words) == 0
    return folder / "run"


@pytest.mark.slow
def test_the_whole_test_split_is_measured(tested, capsys):
    assert cli.main(["evaluate", str(tested), "--split", "test", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (index,) = (tested.parent / "data").glob("*/index.json")
    tokens = json.loads(index.read_text())["splits"]["test"]["tokens"]
    assert result["tokens"] == (tokens - 1) // 32 * 32
    validation = json.loads((tested / "summary.json").read_text())["val_loss"]
    assert result["test/loss"] == pytest.approx(validation, abs=0.1)  # texts of one kind


@pytest.mark.slow
def test_ranks_of_torchrun_evaluate_together_and_the_first_prints(tested, python_of_forks, capsys):
    assert cli.main(["evaluate", str(tested), "--split", "test", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    words = [python_of_forks, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
    words += ["lockstep_gpt", "evaluate", str(tested), "--split", "test", "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    together = json.loads(line)
    assert together["tokens"] == alone["tokens"]
    assert together["test/loss"] == pytest.approx(alone["test/loss"], rel=1e-6)


def test_a_run_without_a_test_split_says_how_to_get_one(finished, monkeypatch, capsys):
    command, _ = finished
    monkeypatch.chdir(command.folder)
    assert cli.main(["evaluate", "runs/first", "--split", "test"]) == 2
    assert (
        "has no test split; prepare one with data.source.test_fraction" in capsys.readouterr().err
    )
