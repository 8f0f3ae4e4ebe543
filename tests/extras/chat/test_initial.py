"""Settings that a fine-tuned model shares with its initial weights."""

import json
import re

import pytest
import yaml

from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat import initial

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


@pytest.mark.parametrize("experiment", ["chat", "[chat,mine]", "[mine,chat]"])
def test_an_experiment_keeps_conversations_apart_alone_and_in_a_list(
    experiment, finished, command, questions
):
    pytest.importorskip("lockstep_gpt.extras.datasets", reason="no such extra")
    folder = command.folder / "own/experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\nlog_every: 7\n")
    source = f"model.init_from={finished[0].folder / 'runs/first'}"
    words = ["train", f"experiment={experiment}", source, f"data.path={questions}"]
    places = ["--config-dir", str(command.folder / "own"), "--cfg", "job"]
    config = yaml.safe_load(command(*words, *places).stdout)
    assert config["packing"]["_target_"].endswith(".datasets.whole_documents.WholeDocuments")
    assert config["documents"]["mask"] is True
    assert config["log_every"] == (10 if experiment in ("chat", "[mine,chat]") else 7)


@pytest.mark.parametrize("experiment", ["[chat,debug]", "['chat','debug']"])
def test_a_list_with_weights_that_are_not_there_is_one_line(experiment, command):
    words = ["train", f"experiment={experiment}", "model.init_from=nowhere"]
    err = command(*words, status=2).stderr
    assert ": model.init_from=nowhere is neither a run, a checkpoint in one," in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("chosen", ["chat", "[chat,mine]", "['mine', 'chat']"])
def test_the_experiment_has_the_shape_of_the_initial_weights(chosen, finished):
    source = f"model.init_from={finished[0].folder / 'runs/first'}"
    words = ["--cfg", "job", f"+experiment={chosen}", source]
    shape = "model=from_weights/initial"
    assert initial.with_initial(words) == [*words[:2], shape, *words[2:]]


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=smoke"],
        ["run_dir=a", "resume=auto"],
        ["experiment=chat", "model=gpt2", "model.init_from=anywhere"],
        ["--multirun", "experiment=chat,smoke", "model.init_from=a,b"],
    ],
)
def test_other_commands_stay_as_they_are(words):
    assert initial.with_initial(words) == words
