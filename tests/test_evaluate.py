import json
import math

import pytest
import torch
import torch.nn.functional as F

from lockstep_gpt import cli
from lockstep_gpt.tokens.prepare import prepare
from lockstep_gpt.tokens.shards import load_index, open_split
from lockstep_gpt.tokens.sources.stdlib import StandardLibrary
from lockstep_gpt.tokens.sources.text import Text
from lockstep_gpt.tokens.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.inference.evaluate import evaluate, main
from lockstep_gpt.run.checkpoint import find_checkpoint
from lockstep_gpt.training.trained_model import load_model

T = 64
PACKING = "lockstep_gpt.extras.datasets.whole_documents"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text_run(saved_run, root):
    return saved_run(ByteTokenizer(), source="stdlib", root=root, val_fraction=0.005, val_tokens=T)


@pytest.fixture(scope="module")
def small_run(saved_run, tmp_path_factory):
    """A run on 2,000 held-out tokens of a file."""
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_text("x" * 7999 + "ab" * 999 + "a")
    data = {"root": str(path.parent / "data"), "path": str(path), "val_fraction": 1999 / 9998}
    frozen = load_index(prepare(Text(**data))).fingerprint
    return saved_run(ByteTokenizer(), source="text", **data, fingerprint=frozen)


def model_of(run):
    return load_model(find_checkpoint(run))


@torch.inference_mode()
def mean_by_hand(model, tokens):
    """The mean over the windows of T tokens, each token predicted once, in float64."""
    tokens = torch.from_numpy(tokens.astype("int64"))
    starts = range(0, len(tokens) - T, T)
    losses = []
    for start in starts:
        window = tokens[start : start + T + 1]
        logits = model(window[None, :-1])[0].double()
        losses.append(F.cross_entropy(logits, window[1:], reduction="sum").item())
    return math.fsum(losses) / (len(starts) * T), len(starts) * T


def test_a_changed_corpus_does_not_change_a_resumed_run(saved_run, tmp_path):
    (corpus := tmp_path / "corpus.txt").write_text("some text to learn from. " * 200)
    data = {"root": str(tmp_path / "data"), "path": str(corpus), "val_fraction": 0.4}
    frozen = load_index(prepare(Text(**data))).fingerprint
    run = saved_run(ByteTokenizer(), source="text", **data, fingerprint=frozen)
    before = evaluate(*model_of(run)[:2], 8)
    corpus.write_text("another text. " * 300)
    assert evaluate(*model_of(run)[:2], 8) == before


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_the_loss_is_the_mean_over_every_whole_window(small_run, batch_size):
    model, config, _ = model_of(small_run)
    loss, count = mean_by_hand(model, open_split(prepare(config.data), "val"))
    result = evaluate(model, config, batch_size)
    assert result["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert result["tokens"] == count == 1984
    assert result["val/perplexity"] == math.exp(result["val/loss"])


def test_text_is_evaluated_whole_and_in_bits_per_byte(text_run, root):
    folder = prepare(StandardLibrary(root=root, val_fraction=0.005))
    result = evaluate(*model_of(text_run)[:2], 64)
    split = load_index(folder).splits["val"]
    assert result["tokens"] == (split.tokens - 1) // T * T > T
    bits = result["val/loss"] * split.tokens / (math.log(2) * split.text_bytes)
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_packed_windows_have_each_held_out_target_and_bits_per_byte(small_run):
    pytest.importorskip(PACKING, reason="no such extra")
    model, config, _ = model_of(small_run)
    config.packing._target_ = f"{PACKING}.WholeDocuments"
    result = evaluate(model, config, 64)
    split = load_index(prepare(config.data)).splits["val"]
    assert result["tokens"] == split.tokens - 1
    bits = result["val/loss"] * split.tokens / (math.log(2) * split.text_bytes)
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_the_screen_and_the_line_for_programs_say_the_same(small_run, capsys):
    assert main([str(small_run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main([str(small_run)]) == 0
    screen = capsys.readouterr().out
    assert result["checkpoint"].endswith("step=000001.ckpt")
    assert f"on {result['tokens']:,} tokens of validation" in screen
    assert f"{'val/loss':<16}{result['val/loss']:.4f}" in screen
    assert f"val/perplexity  {result['val/perplexity']:.4f}" in screen


def test_a_corrupt_checkpoint_is_rejected(small_run, tmp_path):
    path = tmp_path / "step=000001.ckpt"
    path.write_bytes(find_checkpoint(small_run).read_bytes())
    with pytest.raises(UserError, match="has no SHA-256 file next to it"):
        main([str(path)])


@pytest.mark.parametrize("size", ["0", "-3", "many"])
def test_an_invalid_batch_size_is_rejected(small_run, capsys, size):
    try:
        status = cli.main(["evaluate", str(small_run), f"--batch-size={size}"])
    except SystemExit as end:  # errors of the parser itself
        status = end.code
    assert status == 2
    assert "--batch-size" in capsys.readouterr().err


def test_evaluate_gives_the_loss_of_all_that_was_held_out(finished, monkeypatch, capsys):
    command, _ = finished
    monkeypatch.chdir(command.folder)
    assert cli.main(["evaluate", "runs/first", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["val/loss"] == pytest.approx(command.summary("runs/first")["val_loss"], abs=0.3)
    assert result["bits_per_byte"] == pytest.approx(result["val/loss"] / 0.6931472, rel=0.01)
