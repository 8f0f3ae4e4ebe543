"""The template in an export: `apply_chat_template` gives our ids."""

import json
import os
from dataclasses import asdict

import pytest
import torch

from lockstep_gpt.config import (
    BatchConfig,
    Config,
    ModelConfig,
    OptimConfig,
    extended,
)
from lockstep_gpt.data.sources.stdlib import StandardLibrary
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.chat.conversations import Conversations
from lockstep_gpt.extras.chat.export_files import chat_files
from lockstep_gpt.extras.chat.template import template_of
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer
from lockstep_gpt.model.gpt import build_gpt
from lockstep_gpt.run.checkpoint import checkpoint_path, write_checkpoint

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
        model = extended(ModelConfig)(**shape)
        groups = {"batch": BatchConfig(global_size=1), "optim": OptimConfig(algorithm="adamw")}
        config = Config(max_steps=1, model=model, data=data or Conversations(path="a"), **groups)
        weights = build_gpt(model, tokenizer.vocab_size).state_dict()
        content = {
            "state_dict": {f"model.{name}": weight for name, weight in weights.items()},
            "config": asdict(config),
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
            found = theirs.apply_chat_template(
                talk(name), add_generation_prompt=reply, return_dict=False
            )
            assert list(found) == template.render(talk(name), reply), name


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


def test_other_files_stay_as_they_are_also_for_a_mixture(tmp_path):
    files = {"tokenizer_config.json": {"a": 1}, "generation_config.json": {"b": 2}}
    files["tokenizer.json"] = {"model": {"vocab": {"x": 1}}, "added_tokens": []}
    config = Config.__new__(Config)
    config.data = Conversations(path=str(tmp_path))
    found = chat_files(config, ByteTokenizer(), files)
    assert found["tokenizer_config.json"]["a"] == 1
    assert found["generation_config.json"] == {"b": 2, "eos_token_id": [0xFB, 0]}
    talk = config.data._target_
    config.data = StandardLibrary()
    code = config.data._target_
    vars(config.data)["sources"] = {"code": {"_target_": code}}  # as a mixture has
    assert chat_files(config, ByteTokenizer(), files) == {}
    vars(config.data)["sources"]["talk"] = {"_target_": talk}
    assert chat_files(config, ByteTokenizer(), files) == found
