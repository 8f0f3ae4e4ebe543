import json
import math

import pytest
import torch
import torch.nn.functional as F
from lockstep_gpt.evaluate import main, of_split
from lockstep_gpt.trained_model import load_model

from lockstep import commands as cli
from lockstep.checkpoints.reading import (
    find_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from lockstep.errors import UserError
from lockstep.evaluation.command import configuration
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import load_index, open_split
from lockstep.tokens.sources.text import StandardLibrary, Text
from lockstep.tokens.tokenizer import ByteTokenizer

T = 64
PACKING = "lockstep.mixtures.whole_documents"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text_run(saved_run, root):
    return saved_run(ByteTokenizer(), source="stdlib", root=root, val_fraction=0.005, val_tokens=T)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A text of which 2,000 tokens are held out."""
    path = tmp_path_factory.mktemp("corpus") / "text"
    path.write_text("x" * 7999 + "ab" * 999 + "a")
    return Text(path=str(path), root=str(path.parent / "data"), val_fraction=1999 / 9998)


@pytest.fixture(scope="module")
def small_run(saved_run, small):
    """A run on that text."""
    settings = {name: getattr(small, name) for name in ("path", "root", "val_fraction")}
    fingerprint = load_index(prepare(small)).fingerprint
    return saved_run(ByteTokenizer(), source="text", **settings, fingerprint=fingerprint)


def measured(run, batch_size, **changes):
    """Measure a run on its validation split."""
    path = find_checkpoint(run)
    content = read_checkpoint(path)
    cfg = configuration(path, content)
    cfg.update(changes)
    return of_split(cfg, path, content, "val", batch_size)


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
    before = measured(run, 8)
    corpus.write_text("another text. " * 300)
    assert measured(run, 8) == before


@pytest.mark.parametrize("batch_size", [1, 7, 1000])
def test_the_loss_is_the_mean_over_every_whole_window(small_run, small, batch_size):
    model, _, _ = load_model(find_checkpoint(small_run))
    loss, count = mean_by_hand(model, open_split(prepare(small), "val"))
    result = measured(small_run, batch_size)
    assert result["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert result["tokens"] == count == 1984
    assert result["val/perplexity"] == math.exp(result["val/loss"])


def test_text_is_evaluated_whole_and_in_bits_per_byte(text_run, root):
    folder = prepare(StandardLibrary(root=root, val_fraction=0.005))
    result = measured(text_run, 64)
    split = load_index(folder).splits["val"]
    assert result["tokens"] == (split.tokens - 1) // T * T > T
    bits = result["val/loss"] * split.tokens / (math.log(2) * split.text_bytes)
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_packed_windows_have_each_held_out_target_and_bits_per_byte(small_run, small):
    pytest.importorskip(PACKING, reason="no such extra")
    result = measured(small_run, 64, packing={"_target_": f"{PACKING}.WholeDocuments"})
    split = load_index(prepare(small)).splits["val"]
    assert result["tokens"] == split.tokens - 1
    bits = result["val/loss"] * split.tokens / (math.log(2) * split.text_bytes)
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def edited(run, folder, **groups):
    """Return a copy of a run's checkpoint whose configuration has other groups."""
    content = read_checkpoint(find_checkpoint(run))
    path = folder / "checkpoints/step=000001.ckpt"
    write_checkpoint({**content, "config": {**content["config"], **groups}}, path)
    return path


OWN = """
import torch
from lightning import LightningModule

class Mine(LightningModule):
    def __init__(self, model, vocab_size, shift):
        super().__init__()
        self.model = model(vocab_size=vocab_size)
        self.shift = shift

    def validation_step(self, batch, batch_idx):
        tokens, targets = batch
        self.log("val/mine", self.model(tokens, targets) + self.shift, batch_size=len(tokens))
"""


def test_an_own_module_is_measured_once_its_author_is_trusted(
    small_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "owners_module.py").write_text(OWN)
    module = {"_target_": "owners_module.Mine", "model": "${model}", "shift": 1.0}
    path = edited(small_run, tmp_path, module=module)
    assert cli.main(["evaluate", str(path)]) == 2
    line = r"module._target_=owners_module.Mine"
    assert line in (refusal := capsys.readouterr().err)
    assert refusal.endswith("if you trust its author, set --trust\n")
    assert main([str(path), "--trust", "--json", "--batch-size", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    expected = measured(small_run, 1)["val/loss"] + 1.0
    assert result["val/mine"] == pytest.approx(expected, rel=1e-6)
    assert "tokens" not in result


def test_weights_that_do_not_fit_are_one_line(small_run, tmp_path, capsys):
    shape = read_checkpoint(find_checkpoint(small_run))["config"]["model"]
    path = edited(small_run, tmp_path, model={**shape, "n_embd": 32})
    assert cli.main(["evaluate", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "size mismatch" in line
    assert line.endswith("use the code that wrote it")


def test_a_checkpoint_without_data_is_one_line(small_run, tmp_path):
    path = edited(small_run, tmp_path, data=None)
    with pytest.raises(UserError, match="has no data to evaluate with; name another run"):
        main([str(path)])


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
