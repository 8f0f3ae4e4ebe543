"""An export is checked by formulas that equal transformers; an edited model is refused."""

import json

import pytest
import torch
import torch.nn.functional as F
from lockstep_gpt import gpt, modern
from lockstep_gpt.export import export
from lockstep_gpt.layouts import GPT2_COMPUTES, LAYOUTS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lockstep import commands as cli
from lockstep.errors import UserError
from lockstep.hub.gpt2 import ACTIVATIONS
from lockstep.hub.gpt2 import logits_of as gpt2_logits
from lockstep.tokens.tokenizer import ByteTokenizer


def logits_of(folder, tokens):
    """Return what transformers computes from an export."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.inference_mode():
        return theirs(tokens[None]).logits[0]


def squared_relu(layers, x):
    """Map `x` as an edited MLP of GPT-2 does."""
    return layers.projection(F.relu(layers.expansion(x)).square())


def test_the_formula_of_an_export_is_that_of_transformers(pair):
    model, folder = pair
    tokens = torch.randint(256, (24,))
    config = json.loads((folder / "config.json").read_text())
    formula = LAYOUTS[type(model).__name__].formula
    found = formula(tokens, config, load_file(folder / "model.safetensors"))
    torch.testing.assert_close(found, logits_of(folder, tokens), rtol=1e-5, atol=1e-5)


SETTINGS = [
    *({"activation_function": name} for name in ACTIVATIONS),
    {"scale_attn_weights": False},
    {"scale_attn_by_inverse_layer_idx": True},
    {"layer_norm_epsilon": 0.1},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("changed", SETTINGS, ids=str)
def test_each_setting_means_the_same_as_in_transformers(changed):
    torch.manual_seed(0)
    shape = {"vocab_size": 99, "n_positions": 32, "n_layer": 3, "n_head": 4, "n_embd": 48}
    config = GPT2Config(**shape, **{**GPT2_COMPUTES, **changed})
    theirs = GPT2LMHeadModel(config).eval()
    for weight in theirs.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.1)
    tokens = torch.randint(99, (32,))
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
        found = gpt2_logits(tokens, config.to_dict(), theirs.state_dict())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gelu(layers, x):
    """Map `x` as an edited modern MLP does."""
    return layers.projection(F.gelu(layers.expansion(x)))


EDITS = {
    "gpt": (gpt.GPT, gpt.MLP, squared_relu, "GPT-2"),
    "modern": (modern.ModernGPT, modern.MLP, gelu, "modeling_modern.py"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_model_is_refused_and_leaves_nothing(
    shaped, saved, tmp_path, capsys, monkeypatch, name
):
    kind, part, edit, written = EDITS[name]
    source = saved(shaped(kind=kind), ByteTokenizer())
    target = tmp_path / "new/folder"
    monkeypatch.setattr(part, "forward", edit)
    assert cli.main(["export", str(source), "--to", str(target)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{source} cannot be exported: the export's logits differ from the model's by" in line
    assert f"something else: export writes the unedited {written};" in line
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    export(source, target)  # the model without the edit


def test_an_edit_that_transformers_knows_is_exported_by_its_setting(
    shaped, saved, tmp_path, monkeypatch
):
    model = shaped()
    monkeypatch.setattr(gpt.MLP, "forward", squared_relu)
    monkeypatch.setitem(GPT2_COMPUTES, "activation_function", "relu2")  # the remedy
    export(saved(model, ByteTokenizer()), tmp_path / "new")
    tokens = torch.randint(256, (24,))
    expected = model(tokens[None])[0]
    torch.testing.assert_close(logits_of(tmp_path / "new", tokens), expected, rtol=1e-5, atol=1e-5)


def test_an_activation_without_a_formula_is_named(shaped, saved, tmp_path, monkeypatch):
    monkeypatch.setitem(GPT2_COMPUTES, "activation_function", "mish")
    with pytest.raises(UserError, match=r"activation_function=mish is not one of gelu, .+; add it"):
        export(saved(shaped(), ByteTokenizer()), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_model_that_predicts_nothing_yet_is_exported(shaped, saved, tmp_path):
    model = shaped()
    model.token_embedding.weight.data.zero_()  # all logits are 0, as those of a new modern model
    export(saved(model, ByteTokenizer()), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
