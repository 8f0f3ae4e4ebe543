import contextlib

import pytest
import torch

from lockstep_gpt.tokens.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.gpt import GPT
from lockstep_gpt.run.checkpoint import write_checkpoint
from lockstep_gpt.run.checkpoint_content import refuse_broken_weights
from lockstep_gpt.training import trained_model
from lockstep_gpt.training.trained_model import load_model

SHAPE = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
CONFIG = {
    "max_steps": 10,
    "batch": {"global_size": 4},
    "model": SHAPE,
    "data": {"_target_": "lockstep_gpt.tokens.sources.stdlib.StandardLibrary"},
    "optim": {"algorithm": "adamw"},
}


def saved_model(path, **config):
    torch.manual_seed(0)
    model = GPT(256, **SHAPE, dropout=0.5)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    content = {
        "config": {**CONFIG, **config},
        "tokenizer": ByteTokenizer().to_dict(),
        "state_dict": weights,
    }
    write_checkpoint(content, path)
    return model


def test_a_model_read_back_gives_the_same_logits_without_dropout(tmp_path):
    model = saved_model(tmp_path / "step=000001.ckpt", model={**SHAPE, "dropout": 0.5})
    read, config, tokenizer = load_model(tmp_path / "step=000001.ckpt")
    tokens = torch.arange(8)[None]
    assert torch.equal(read(tokens), model.eval()(tokens))
    assert (config.model.dropout, config.max_steps) == (0.5, 10)
    assert isinstance(tokenizer, ByteTokenizer)


def test_a_run_that_replaces_its_newest_checkpoint_meanwhile_gives_the_next(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved_model(folder / "step=000001.ckpt")

    def load_after_replacement(path, *options):
        if path.name == "step=000001.ckpt":
            path.unlink()
            saved_model(folder / "step=000002.ckpt")
        return load_model(path, *options)

    monkeypatch.setattr(trained_model, "load_model", load_after_replacement)
    assert trained_model.load_named_model(tmp_path)[0] == folder / "step=000002.ckpt"
    monkeypatch.setattr(trained_model, "load_model", load_model)
    (folder / "step=000002.ckpt.sha256").unlink()
    with pytest.raises(UserError, match=r"copy step=000002\.ckpt\.sha256, too"):
        trained_model.load_named_model(folder / "step=000002.ckpt")


def test_a_model_with_weights_that_are_not_finite_is_refused(tmp_path):
    path = tmp_path / "step=000001.ckpt"
    model = saved_model(path)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    weights["model.final_norm.weight"].fill_(torch.nan)
    tokenizer = ByteTokenizer().to_dict()
    write_checkpoint({"config": CONFIG, "tokenizer": tokenizer, "state_dict": weights}, path)
    with pytest.raises(UserError, match=r"such as final_norm\.weight; use another checkpoint$"):
        load_model(path)


@pytest.mark.parametrize(
    ("numbers", "is_refused"),
    [
        ([1.0, torch.nan], True),
        ([torch.inf, -torch.inf], True),
        ([3e38, 3e38], False),  # their sum is infinite
        ([1.0, -1.0], False),
    ],
)
def test_weights_are_refused_for_their_numbers_not_for_their_sum(numbers, is_refused):
    refused = contextlib.nullcontext()
    if is_refused:
        refused = pytest.raises(UserError, match="such as w; use")
    with refused:
        refuse_broken_weights([("w", torch.tensor(numbers))], "checkpoint c")


def test_a_model_is_readable_without_the_run_s_environment(tmp_path):
    logger = {"wandb": {"entity": "${oc.env:GONE_WITH_THE_RUN}"}}
    saved_model(tmp_path / "step=000001.ckpt", logger=logger)
    load_model(tmp_path / "step=000001.ckpt")


def test_a_model_with_the_tokenizer_of_a_deleted_extra_fails_in_one_line(tmp_path):
    content = {"config": CONFIG, "tokenizer": {"kind": "gone"}, "state_dict": {}}
    write_checkpoint(content, tmp_path / "step=000001.ckpt")
    with pytest.raises(UserError, match=r"kind 'gone' is not one of bytes, .*; use .* extras"):
        load_model(tmp_path / "step=000001.ckpt")


@pytest.mark.parametrize("escapes", ["", "\\", "\\\\"])
def test_references_in_a_checkpoint_are_never_resolved(tmp_path, monkeypatch, escapes):
    monkeypatch.setenv("CANARY", "secret")
    named = f"x{escapes}${{oc.env:CANARY}}"
    target = "lockstep_gpt.tokens.sources.text.Text"
    data = {"_target_": target, "path": named, "root": f"{escapes}${{seed}}"}
    saved_model(tmp_path / "step=000001.ckpt", data=data)
    _, config, _ = load_model(tmp_path / "step=000001.ckpt")
    assert (config.data.path, config.data.root) == (named, data["root"])
