"""Settings that a fine-tuned model shares with its initial weights."""

import json
import re

import pytest

from lockstep_gpt.config import ModelConfig, UserError
from lockstep_gpt.extras.chat import initial
from lockstep_gpt.extras.chat.chat_settings import ChatData

GPT2 = {"model_type": "gpt2", "n_positions": 48, "n_layer": 2, "n_head": 2, "n_embd": 8}
MODERN = {**GPT2, "model_type": "modern_gpt", "block_size": 32, "ngram_rows": 64}


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (GPT2, {"architecture": "gpt", "block_size": 48, "bias": True, "n_layer": 2}),
        (MODERN, {"architecture": "modern", "block_size": 32, "bias": False, "ngram_rows": 64}),
    ],
)
def test_a_folder_tells_its_shape(saved, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert initial.shape_of(str(tmp_path)).items() >= expected.items()


def test_a_run_and_its_checkpoint_tell_the_same_shape(finished):
    run = finished[0].folder / "runs/first"
    shape = initial.shape_of(str(run))
    assert (shape["architecture"], shape["block_size"], shape["n_embd"]) == ("gpt", 32, 32)
    assert initial.shape_of(str(run / "checkpoints/step=000020.ckpt")) == shape


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "is neither a run, a checkpoint in one, nor a folder with config.json; give one"),
        ("{", "has a config.json of none of gpt2, modern_gpt; give one"),
        ('{"model_type": "llama"}', "has a config.json of none of gpt2, modern_gpt; give one"),
    ],
)
def test_another_folder_is_one_line(content, line, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(f"model.init_from={tmp_path} {line}")):
        initial.shape_of(str(tmp_path))


@pytest.mark.parametrize("given", [[], ["data.packing=stream"]])
def test_a_chat_keeps_conversations_apart_where_settings_for_it_exist(given, finished, monkeypatch):
    packed = type("Packed", (ChatData,), {"packing": "stream"})
    masked = type("Masked", (ModelConfig,), {"mask_documents": False})
    source = f"model.init_from={finished[0].folder / 'runs/first'}"
    words = ["experiment=chat", source, *given]
    monkeypatch.setattr(initial, "data_sources", lambda: {"chat": packed})
    monkeypatch.setattr(initial, "extended", lambda _: masked)
    added = [word for word in initial.with_initial(words) if word not in words]
    assert added == ["model.mask_documents=true", *([] if given else ["data.packing=documents"])]
    monkeypatch.setattr(initial, "data_sources", lambda: {"chat": ChatData})
    monkeypatch.setattr(initial, "extended", lambda own: own)
    assert initial.with_initial(words) == words


@pytest.mark.parametrize("words", [["experiment=smoke"], ["run_dir=a", "resume=auto"]])
def test_other_commands_stay_as_they_are(words):
    assert initial.with_initial(words) == words
