"""Exports: transformers computes the same from them, and nothing is ever half written."""

import json
import os
import re
import shutil
import sys

import pytest
import torch
from lockstep_gpt.export import export, main
from lockstep_gpt.trained_model import load_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep import commands as cli
from lockstep.checkpoints.reading import (
    read_checkpoint,
    remove_checkpoint,
    write_checkpoint,
)
from lockstep.errors import UserError
from lockstep.hub import folder as module
from lockstep.hub.card import mark
from lockstep.optional import install_command
from lockstep.tokens.tokenizer import ByteTokenizer


@pytest.fixture(scope="session")
def gpt(shaped, saved):
    """The checkpoint of a GPT."""
    return saved(shaped(), ByteTokenizer())


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_logits_and_loss_are_those_of_the_model(pair):
    model, folder = pair
    theirs = load(folder)
    tokens = torch.randint(256, (2, 24))
    expected = theirs(tokens, labels=tokens)
    assert expected.logits.abs().max() > 1
    torch.testing.assert_close(expected.logits, model(tokens), rtol=1e-5, atol=1e-5)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(expected.loss, loss, rtol=1e-5, atol=1e-5)


def test_a_model_saved_again_by_transformers_is_unchanged(pair, tmp_path):
    model, folder = pair
    load(folder).save_pretrained(tmp_path)
    tokens = torch.randint(256, (1, 9))
    torch.testing.assert_close(load(tmp_path)(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_transformers_continues_a_prompt_with_the_same_tokens(pair):
    model, folder = pair
    tokens = torch.randint(1, 256, (2, 5))
    ours = model.generate(tokens, 12, temperature=0)
    theirs = load(folder).generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
    )
    for mine, other in zip(ours.tolist(), theirs.tolist(), strict=True):
        end = other.index(0, 5) if 0 in other[5:] else len(other)  # transformers stops at it
        assert other[:end] == mine[:end]


@pytest.mark.parametrize("vocab_size", [300, 320, 50257])
def test_rows_that_pad_the_vocabulary_stay_at_home(shaped, folder_of, numbers, vocab_size):
    model = shaped(vocab_size=vocab_size, n_layer=1)
    theirs = load(folder_of(model, numbers(vocab_size)))
    assert theirs.get_input_embeddings().weight.shape == (vocab_size, 48)
    tokens = torch.randint(vocab_size, (1, 24))
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-5)


def test_the_head_of_gpt_2_stays_tied(shaped, folder_of):
    theirs = load(folder_of(shaped(), ByteTokenizer()))
    assert theirs.lm_head.weight.data_ptr() == theirs.transformer.wte.weight.data_ptr()


def test_the_card_is_the_receipt_and_its_code_runs(pair, capsys, monkeypatch):
    _, folder = pair
    card = (folder / "README.md").read_text(encoding="utf-8")
    for line in (
        "| data | StandardLibrary |",
        "| tokens seen | 1,344 in 7 steps |",
        "| validation loss | 3.2199 nats per token |",
        "| checkpoint | `step=000007.ckpt` |",
        "  lr: 0.003",
    ):
        assert line in card
    assert "# told" in card
    assert "nobody's business" not in card
    monkeypatch.chdir(folder)
    exec(card.split("```python\n")[1].split("```")[0])
    assert capsys.readouterr().out.startswith("def f(x, y):")


def test_a_checkpoint_without_metrics_can_be_exported(shaped, saved, tmp_path):
    more = {"callbacks": {}, "loops": {}}
    export(saved(shaped(), ByteTokenizer(), **more), tmp_path / "new")
    card = (tmp_path / "new/README.md").read_text(encoding="utf-8")
    assert "| tokens seen | not known |" in card
    assert "| validation loss | not measured |" in card


def test_the_card_names_the_run_s_revision_if_it_is_known(shaped, saved, tmp_path):
    source = saved(shaped(), ByteTokenizer())
    noted = {"git_revision": "abc123", "git_dirty": True}
    (source.parents[1] / "environment.json").write_text(json.dumps(noted), encoding="utf-8")
    export(source, tmp_path / "new")
    card = (tmp_path / "new/README.md").read_text(encoding="utf-8")
    assert "| code | revision `abc123` when trained, with changes that are not in it |" in card
    (source.parents[1] / "environment.json").write_text('{"git_revi')
    export(source, tmp_path / "torn")
    assert "when trained" not in (tmp_path / "torn/README.md").read_text(encoding="utf-8")


def test_the_command_exports_a_run_into_its_folder(gpt, capsys):
    run = gpt.parents[1]
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'export'}: ")
    assert {path.name for path in (run / "export").iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    modes = {path.stat().st_mode for path in (run / "export").iterdir()}
    assert len(modes) == 1  # anyone who may read one may read all


def test_an_export_takes_the_next_checkpoint_if_the_run_replaces_the_newest(
    gpt, tmp_path, monkeypatch
):
    shutil.copytree(gpt.parent, tmp_path / "checkpoints")
    first = tmp_path / "checkpoints" / gpt.name
    second = first.with_name("step=000999.ckpt")

    def load_after_replacement(path, *options):
        if path == first:
            write_checkpoint(read_checkpoint(first), second)
            remove_checkpoint(first)
        return load_model(path, *options)

    monkeypatch.setattr("lockstep_gpt.export.load_model", load_after_replacement)
    assert main([str(tmp_path)]) == 0
    assert f"`{second.name}`" in (tmp_path / "export/README.md").read_text(encoding="utf-8")


def test_numbers_travel_too(shaped, folder_of, numbers):
    tokenizer = AutoTokenizer.from_pretrained(folder_of(shaped(), numbers(256)))
    assert tokenizer("7 0 255").input_ids == [7, 0, 255]
    assert tokenizer.decode([7, 0, 255]) == "7 0 255"
    assert tokenizer.eos_token_id is None


def refused(capsys, *words):
    assert cli.main(["export", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_export_is_replaced_only_by_force(gpt, tmp_path, capsys):
    target = tmp_path / "new"
    assert main([str(gpt), "--to", str(target)]) == 0
    (target / "added.txt").touch()
    line = refused(capsys, gpt, "--to", target)
    assert line.endswith(
        f"{target} already contains an export; name another folder with --to, or add --force"
    )
    assert main([str(gpt), "--to", str(target), "--force"]) == 0
    assert not (target / "added.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_is_not_an_export_is_never_replaced(gpt, tmp_path, capsys):
    for name in ("config.json", "README.md"):  # as in any model of the hub
        (tmp_path / name).write_text("{}")
    line = refused(capsys, gpt, "--to", tmp_path, "--force")
    assert "is not empty and is not an export" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json"]


def test_a_file_in_the_way_is_rejected(gpt, tmp_path, capsys):
    (tmp_path / "new").touch()
    assert "not an export" in refused(capsys, gpt, "--to", tmp_path / "new")


def test_an_empty_folder_is_filled(gpt, tmp_path):
    export(gpt, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_an_architecture_unknown_to_transformers_is_rejected(shaped, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep_gpt.layouts.LAYOUTS", {"other": None})
    with pytest.raises(UserError, match="GPT is not one of other, which transformers"):
        export(saved(shaped(), ByteTokenizer()), tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_layer_missing_in_gpt_2_is_rejected(shaped, saved, tmp_path, monkeypatch):
    model = shaped()
    model.extra_norm = torch.nn.LayerNorm(4)
    source = saved(shaped(), ByteTokenizer())
    monkeypatch.setattr(
        "lockstep_gpt.export.load_model", lambda *_, **__: (model, None, ByteTokenizer())
    )
    with pytest.raises(UserError, match=r"extra_norm.weight does not exist in GPT-2; describe"):
        export(source, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_a_run_needs_a_name(gpt, tmp_path, capsys):
    for path in gpt.parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert refused(capsys, tmp_path / gpt.name).endswith("add --to FOLDER")


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_write_changes_nothing(gpt, tmp_path, monkeypatch, force):
    target = tmp_path / "new"
    if force:
        export(gpt, target)
        (target / "mark").touch()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_save_weights", full)
    with pytest.raises(UserError, match="cannot be written \\(No space left on device\\)"):
        export(gpt, target, force)
    assert [path.name for path in tmp_path.iterdir()] == (["new"] if force else [])
    assert not force or (target / "mark").exists()


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_one_line_and_keeps_the_earlier_export(gpt, tmp_path):
    target = tmp_path / "new"
    target.mkdir()
    (target / "README.md").write_text(mark())
    with pytest.raises(
        UserError, match=r"new cannot be written \(.*File too large.*\); raise the "
    ):
        export(gpt, target, force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "README.md"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_created_is_reported(gpt, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written"):
        export(gpt, tmp_path / "new")


def test_a_missing_library_is_named(gpt, tmp_path, monkeypatch):
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    line = f"export needs safetensors, which is not installed; run: {install_command('hub')}"
    with pytest.raises(UserError, match=re.escape(line)):
        export(gpt, tmp_path / "new")
    assert not list(tmp_path.iterdir())
