import contextlib

import pytest
import torch
from lockstep_gpt.gpt import GPT
from lockstep_gpt.trained_model import load_for_inference, load_model, mask_as_trained
from omegaconf import OmegaConf

from lockstep.checkpoints.content import refuse_broken_weights
from lockstep.checkpoints.reading import read_checkpoint, with_newest, write_checkpoint
from lockstep.errors import UserError
from lockstep.mixtures.mask import Documents
from lockstep.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def untrusted(tmp_path, monkeypatch):
    """Let this user have trusted nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


SHAPE = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16}
CONFIG = {
    "max_steps": 10,
    "model": {"_target_": "lockstep_gpt.gpt.GPT", "_partial_": True, **SHAPE},
    "module": {"_target_": "lockstep_gpt.module.GPTModule", "model": "${model}"},
}


def saved_model(path, tokenizer=None, **config):
    torch.manual_seed(0)
    model = GPT(256, **SHAPE, dropout=0.5)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    tokenizer = tokenizer or ByteTokenizer().to_dict()
    content = {
        "config": {**CONFIG, **config},
        "Tokens": {"tokenizer": tokenizer, "fingerprint": "0" * 8},
        "state_dict": weights,
    }
    write_checkpoint(content, path)
    return model


def test_a_model_read_back_gives_the_same_logits_without_dropout(tmp_path):
    model = saved_model(tmp_path / "step=000001.ckpt", model={**CONFIG["model"], "dropout": 0.5})
    read, config, tokenizer = load_model(tmp_path / "step=000001.ckpt")
    tokens = torch.arange(8)[None]
    assert torch.equal(read(tokens), model.eval()(tokens))
    assert (config.model.dropout, config.max_steps) == (0.5, 10)
    assert isinstance(tokenizer, ByteTokenizer)


def test_a_run_that_replaces_its_newest_checkpoint_meanwhile_gives_the_next(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved_model(folder / "step=000001.ckpt")

    def load_after_replacement(path):
        if path.name == "step=000001.ckpt":
            path.unlink()
            saved_model(folder / "step=000002.ckpt")
        load_model(path)
        return path

    assert with_newest(tmp_path, load_after_replacement) == folder / "step=000002.ckpt"
    assert load_for_inference(tmp_path)[0] == folder / "step=000002.ckpt"
    (folder / "step=000002.ckpt.sha256").unlink()
    with pytest.raises(UserError, match=r"copy step=000002\.ckpt\.sha256, too"):
        load_for_inference(folder / "step=000002.ckpt")


def test_a_model_with_weights_that_are_not_finite_is_refused(tmp_path):
    path = tmp_path / "step=000001.ckpt"
    model = saved_model(path)
    weights = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    weights["model.final_norm.weight"].fill_(torch.nan)
    write_checkpoint({**read_checkpoint(path), "state_dict": weights}, path)
    with pytest.raises(
        UserError, match=r"such as model\.final_norm\.weight; use another checkpoint$"
    ):
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


def test_a_model_with_the_tokenizer_of_another_version_fails_in_one_line(tmp_path):
    saved_model(tmp_path / "step=000001.ckpt", tokenizer={"kind": "gone"})
    with pytest.raises(UserError, match=r"kind 'gone' is not one of bytes, .*; use "):
        load_model(tmp_path / "step=000001.ckpt")


def test_the_data_module_may_have_any_name(tmp_path):
    path = tmp_path / "step=000001.ckpt"
    saved_model(path)
    content = read_checkpoint(path)
    write_checkpoint({**content, "Corpus": content["Tokens"], "Tokens": {}}, path)
    assert isinstance(load_model(path)[2], ByteTokenizer)
    write_checkpoint({**content, "Tokens": {}}, path)
    with pytest.raises(UserError, match=r"ckpt has no tokenizer; use a checkpoint of a run on"):
        load_model(path)


def test_the_weights_of_another_module_are_for_evaluate(tmp_path):
    path = tmp_path / "step=000001.ckpt"
    saved_model(path, module={"_target_": "owners.Module"})
    with pytest.raises(UserError, match=r"of owners\.Module, .* is for the GPT .* evaluate"):
        load_model(path)


@pytest.mark.parametrize("escapes", ["", "\\", "\\\\"])
def test_references_in_a_checkpoint_are_never_resolved(tmp_path, monkeypatch, escapes):
    monkeypatch.setenv("CANARY", "secret")
    named = f"x{escapes}${{oc.env:CANARY}}"
    data = {"path": named, "root": f"{escapes}${{seed:}}"}
    saved_model(tmp_path / "step=000001.ckpt", data=data)
    _, config, _ = load_model(tmp_path / "step=000001.ckpt")
    assert (config.data.path, config.data.root) == (named, data["root"])


@pytest.mark.usefixtures("untrusted")
@pytest.mark.parametrize(
    "model",
    [
        {"_target_": "shutil.rmtree", "path": "CANARY"},
        {"_target_": "${evil}", "path": "CANARY"},
        {**CONFIG["model"], "bias": {"_target_": "shutil.rmtree", "path": "CANARY"}},
        {**CONFIG["model"], "bias": "${oc.env:HOME}"},
        {**CONFIG["model"], "bias": "${a}${b}"},  # together, a reference to the environment
        {**CONFIG["model"], "bias": "${${c}:HOME}"},
    ],
)
def test_nothing_runs_that_only_a_checkpoint_names(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CANARY").mkdir()
    more = {"evil": "shutil.rmtree", "a": "$", "b": "{oc.env:HOME}", "c": "oc.env"}
    path = tmp_path / "step=000001.ckpt"
    saved_model(path, model={**SHAPE, **model}, **more)
    with pytest.raises(UserError, match=r"which no run that you started here has used; .*--trust$"):
        load_model(path)
    assert (tmp_path / "CANARY").is_dir()


@pytest.mark.usefixtures("untrusted")
def test_a_class_of_an_owner_s_is_used_once_its_author_is_trusted(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    own = "from lockstep_gpt.gpt import GPT as Mine\n"
    (tmp_path / "owners_model.py").write_text(own)
    path = tmp_path / "step=000001.ckpt"
    saved_model(path, model={**CONFIG["model"], "_target_": "owners_model.Mine"})
    with pytest.raises(UserError, match="--trust"):
        load_model(path)
    load_model(path, trusted=True)
    load_model(path)  # it is remembered


MASKS = {"_target_": "lockstep.mixtures.MaskDocuments", "compiled": True}


@pytest.mark.parametrize("callbacks", [{}, {"sample": None}, {"documents": MASKS}, None])
def test_only_a_run_with_the_callback_has_a_masked_model(callbacks):
    model = GPT(vocab_size=50, **SHAPE)
    mask_as_trained(OmegaConf.create({"callbacks": callbacks}), model, ByteTokenizer())
    is_masked = isinstance(getattr(model.positions, "__self__", None), Documents)
    assert is_masked is ("documents" in (callbacks or {}))
