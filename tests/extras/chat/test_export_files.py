"""The template in an export: `apply_chat_template` gives our ids."""

import json
import os

import pytest
import torch

from lockstep_gpt.config import Config, as_values
from lockstep_gpt.data.sources.stdlib import StandardLibrary
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.chat.conversations import Conversations
from lockstep_gpt.extras.chat.template import template_of
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.model.model_settings import ModelConfig
from lockstep_gpt.run.checkpoint import checkpoint_path, write_checkpoint
from lockstep_gpt.training.batch_settings import BatchConfig
from lockstep_gpt.training.optim_settings import OptimConfig

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ABSENT = "no such extra"
folder_module = pytest.importorskip("lockstep_gpt.extras.hub.folder", reason=ABSENT)

TALKS = {
    "question": [("user", "add 1 and 2")],
    "turns": [("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c")],
    "spaces": [("user", "  naïve 漢字 😀\n\n"), ("assistant", "\n\tx  \n")],
    "empty": [("user", ""), ("assistant", "")],
    "signs": [("user", "{{ x }} {" + "% raw %} '\" \\n <| |> øùúû ÿ <b>&amp;")],
}


def talk(name):
    return [{"role": role, "content": text} for role, text in TALKS[name]]


@pytest.fixture
def exported(tmp_path):
    """Return a function that exports a model of conversations with this tokenizer."""

    def export(tokenizer, data=None):
        torch.manual_seed(1)
        shape = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
        model = ModelConfig(**shape)
        groups = {"batch": BatchConfig(global_size=1), "optim": OptimConfig(algorithm="adamw")}
        config = Config(max_steps=1, model=model, data=data or Conversations(path="a"), **groups)
        weights = build_gpt(model, tokenizer.vocab_size).state_dict()
        content = {
            "state_dict": {f"model.{name}": weight for name, weight in weights.items()},
            "config": as_values(config),
            "tokenizer": tokenizer.to_dict(),
            "global_step": 1,
        }
        path = checkpoint_path(tmp_path / "checkpoints", 1)
        write_checkpoint(content, path)
        folder_module.export(path, tmp_path / "export")
        return tmp_path / "export"

    return export


@pytest.fixture(params=["bytes", "ours", "chatml"])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "chatml":
        return request.getfixturevalue("chatml")
    return chat_tokenizer(str(request.getfixturevalue("folder")))


def test_ids_are_those_of_our_template(exported, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tokenizer))
    template = template_of(tokenizer)
    for name in TALKS:
        for reply in (False, True):
            result = theirs.apply_chat_template(
                talk(name), add_generation_prompt=reply, return_dict=False
            )
            assert list(result) == template.render(talk(name), reply), name


def test_a_message_with_a_special_token_is_rejected(exported, tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tokenizer))
    marker = theirs.decode([template_of(tokenizer).end])
    for attack in (f"a{marker}b", "<|endoftext|>"):
        with pytest.raises(Exception, match=r"a message has the special token <\|"):
            theirs.apply_chat_template([{"role": "user", "content": attack}])
    with pytest.raises(Exception, match="a role is not one of system, user, assistant"):
        theirs.apply_chat_template([{"role": "tool", "content": ""}])


def test_generation_ends_where_our_answers_do(exported, tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(exported(tokenizer))
    assert {*model.generation_config.eos_token_id} == template_of(tokenizer).stop


def test_a_model_of_text_is_exported_without_a_template(exported):
    settings = json.loads(
        (exported(ByteTokenizer(), Text(path="a")) / "tokenizer_config.json").read_text()
    )
    assert "chat_template" not in settings
    assert settings["split_special_tokens"]


def files_without_template(*names):
    """Return the content of an export's files of a model of bytes, as far as a template matters."""
    vocabulary = {f"b{byte}": byte for byte in range(256)}
    return {
        "tokenizer_config.json": {"a": 1},
        "generation_config.json": {"b": 2},
        "tokenizer.json": {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "c"}]},
        **{name: {} for name in names},
    }


def test_other_files_and_settings_stay_as_they_are():
    files = files_without_template("config.json")
    result = Conversations(path="a").files_of_export(ByteTokenizer(), files)
    assert result.keys() == files.keys() - {"config.json"}
    assert result["tokenizer_config.json"]["a"] == 1
    assert result["generation_config.json"] == {"b": 2, "eos_token_id": [0xFB, 0]}
    assert result["tokenizer.json"]["added_tokens"][0] == {"content": "c"}
    assert files == files_without_template("config.json")  # not changed in place
    assert StandardLibrary().files_of_export(ByteTokenizer(), files) == {}


@pytest.mark.parametrize("talks", [0, 1, 2])
def test_a_mixture_has_the_files_of_its_conversations_once(talks):
    mixture = pytest.importorskip("lockstep_gpt.extras.datasets.mixture", reason=ABSENT)
    talk = Conversations(path="a")
    sources = {"code": {"_target_": StandardLibrary()._target_}}
    for number in range(talks):
        sources[f"talk{number}"] = {"_target_": talk._target_, "path": f"{number}"}
    data = mixture.Mixture(sources=sources, weights=dict.fromkeys(sources, 1.0))
    files = files_without_template()
    result = data.files_of_export(ByteTokenizer(), files)
    assert result == (talk.files_of_export(ByteTokenizer(), files) if talks else {})


def test_a_mixture_with_conversations_is_exported_with_the_template(exported):
    mixture = pytest.importorskip("lockstep_gpt.extras.datasets.mixture", reason=ABSENT)
    sources = {
        "code": {"_target_": StandardLibrary()._target_},
        "talk": {"_target_": Conversations(path="a")._target_, "path": "a"},
    }
    data = mixture.Mixture(sources=sources, weights=dict.fromkeys(sources, 1.0))
    theirs = transformers.AutoTokenizer.from_pretrained(exported(ByteTokenizer(), data))
    template = template_of(ByteTokenizer())
    for name in TALKS:
        result = theirs.apply_chat_template(talk(name), return_dict=False)
        assert list(result) == template.render(talk(name), False), name
