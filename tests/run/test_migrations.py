import re
from pkgutil import resolve_name

import pytest

from lockstep_gpt import catalog, extras
from lockstep_gpt.config import from_container, groups
from lockstep_gpt.config_files import target_of
from lockstep_gpt.data import data_settings
from lockstep_gpt.errors import UserError
from lockstep_gpt.run.directory import refuse_another_identity
from lockstep_gpt.run.migrations import MOVED_SETTINGS, MOVED_TARGETS, migrate

CHOICES = data_settings.data_choices()
SOURCES = {name: f"{choice.__module__}.{choice.__name__}" for name, choice in CHOICES.items()}
PACKINGS = {name: target_of("packing", name) for name in ("stream", "documents")}
needs_datasets = pytest.mark.skipif("mixture" not in SOURCES, reason="no such extra: datasets")


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_of_0_1_0_finds_its_prepared_folders_by_its_name(source):
    assert CHOICES[source].kind == source
    migrated = migrate({"data": {"source": source}})
    assert migrated["data"] == {"_target_": SOURCES[source]}


def test_a_source_of_an_absent_extra_is_one_clear_line():
    line = r"data=gone, which needs a file gone\.yaml in configs/data/"
    with pytest.raises(UserError, match=line):
        migrate({"data": {"source": "gone"}})


def test_a_source_of_an_absent_extra_names_the_command_that_adds_it(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "__path__", [str(tmp_path)])
    line = f"data=mixture, which needs {catalog.how_to_add('datasets')}"
    with pytest.raises(UserError, match=re.escape(line)):
        migrate({"data": {"source": "mixture"}})


def test_classes_and_settings_that_moved_are_found():
    frozen = {
        "callbacks": {
            "report": {"_target_": "lockstep_gpt.extras.seeing.at_end.ReportAtEnd"},
            "panel": {"_target_": f"{extras.__name__}.seeing.sync_panel.SyncPanel", "every": 3},
            "mine": {"_target_": "elsewhere.lockstep_gpt.extras.seeing.Mine"},
        },
        "launch": {"warm": None, "inline": True},
        "model": {
            "n_layer": 2,
            "n_kv_head": None,
            "gone": None,
            "lora_rank": 4,
            "lora_alpha": None,
            "mask_documents": False,
        },
    }
    assert migrate(frozen) == {
        "callbacks": {
            "panel": {"_target_": f"{extras.__name__}.pages.sync_panel.SyncPanel", "every": 3},
            "mine": {"_target_": "elsewhere.lockstep_gpt.extras.seeing.Mine"},
        },
        "launch": {"inline": True},
        "model": {"n_layer": 2, "n_kv_head": None},
        "lora": {"rank": 4},
    }


def test_each_new_place_of_a_class_or_a_setting_exists():
    for place in MOVED_TARGETS.values():
        if catalog.extra_of_target(place) is None:
            assert resolve_name(place.removesuffix(".")), place
    known = groups()
    for setting in MOVED_SETTINGS.values():
        group, _, name = setting.partition(".")
        assert catalog.extra_of_group(group) or hasattr(known[group], name), setting


def test_values_of_this_version_stay_as_they_are():
    values = {"seed": 1, "data": {"_target_": SOURCES["text"], "path": "books"}}
    assert migrate(values) == values
    assert migrate({}) == {}


def test_what_0_1_0_froze_is_read_and_its_other_settings_stay():
    frozen = {
        "max_steps": 3,
        "data": {
            "source": "text",
            "path": "books",
            "tokenizer": "bpe",
            "vocab_size": 300,
            "num_workers": 2,
            "packing": "stream",
            "fingerprint": "ab" * 32,
        },
    }
    migrated = migrate(frozen)
    assert migrated["packing"] == {"_target_": PACKINGS["stream"]}
    assert migrated["data"] == {
        "_target_": SOURCES["text"],
        "path": "books",
        "tokenizer": "bpe",
        "vocab_size": 300,
        "fingerprint": "ab" * 32,
    }
    assert frozen["data"]["source"] == "text"  # not changed in place


@needs_datasets
def test_each_source_of_a_mixture_of_0_1_0_gets_its_class():
    notes = {"source": "jsonl", "path": "a.jsonl", "num_workers": 0, "packing": "stream"}
    sources = {"code": {"source": "stdlib"}, "notes": notes}
    migrated = migrate({"data": {"source": "mixture", "sources": sources, "packing": "documents"}})
    assert migrated["packing"] == {"_target_": PACKINGS["documents"]}
    assert migrated["data"] == {
        "_target_": SOURCES["mixture"],
        "sources": {
            "code": {"_target_": SOURCES["stdlib"]},
            "notes": {"_target_": SOURCES["jsonl"], "path": "a.jsonl"},
        },
    }


@needs_datasets
def test_a_checkpoint_of_0_1_0_is_compared_by_what_its_settings_are_called_now():
    data = {"source": "text", "packing": "documents", "val_fraction": 0.1}
    saved = {"seed": 1, "data": data}
    same = {
        "seed": 1,
        "data": {"_target_": SOURCES["text"], "val_fraction": 0.1},
        "packing": {"_target_": PACKINGS["documents"]},
    }
    refuse_another_identity("the checkpoint", saved, same)
    other = {**same, "packing": {"_target_": PACKINGS["stream"]}}
    with pytest.raises(ValueError, match=r"packing\._target_=\S+Stream instead of \S+Documents"):
        refuse_another_identity("the checkpoint", saved, other)
    other = {**same, "data": {"_target_": SOURCES["stdlib"], "val_fraction": 0.1}}
    with pytest.raises(ValueError, match=r"data\._target_=\S+StandardLibrary instead of \S+Text"):
        refuse_another_identity("the checkpoint", saved, other)


@pytest.mark.slow
def test_a_run_that_0_1_0_froze_resumes_with_the_same_bits(command, weights_of):
    run = command.folder / "runs/first"
    command("train", "experiment=smoke", "run_dir=runs/first", "checkpoint.keep_last=2")
    uninterrupted = weights_of(run / "checkpoints/step=000020.ckpt")
    text = (run / "config.yaml").read_text(encoding="utf-8")
    target = f"  _target_: {SOURCES['stdlib']}\n"
    assert target in text
    former = text.replace(target, "  source: stdlib\n  num_workers: 0\n  packing: stream\n")
    former = former.replace(f"packing:\n  _target_: {PACKINGS['stream']}\n", "")
    assert former.count("_target_") == text.count("_target_") - 2
    (run / "config.yaml").write_text(former, encoding="utf-8")
    for path in run.glob("checkpoints/step=000020*"):
        path.unlink()
    (run / "summary.json").unlink()
    command("train", "run_dir=runs/first", "resume=auto")
    resumed = weights_of(run / "checkpoints/step=000020.ckpt")
    assert resumed == uninterrupted


@pytest.fixture
def weights_of():
    """Return a function that digests the weights in a checkpoint."""
    import hashlib

    import torch

    def digest(path):
        content = torch.load(path, weights_only=True)
        weights = sorted(content["state_dict"].items())
        parts = [name.encode() + weight.numpy().tobytes() for name, weight in weights]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    return digest


def test_a_class_of_someone_else_s_file_is_not_imported(composed):
    config = composed("experiment=smoke")
    values = {"max_steps": 1, "data": {"_target_": "antigravity.Data", "rows": 3}}
    read = from_container({**_required(config), **values})
    assert read.data.arguments == {"rows": 3}
    import sys

    assert "antigravity" not in sys.modules


def _required(config):
    """Return the settings of a configuration without a default, as plain values."""
    from dataclasses import asdict

    values = asdict(config)
    return {name: values[name] for name in ("model", "batch", "optim")}
