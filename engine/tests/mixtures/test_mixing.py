"""A mixture's prepared folder holds the state of every source."""

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import UserError
from lockstep.tokens.prepare import prepare
from lockstep.tokens.shards import check_content, load_index
from lockstep.tokens.sources.text import Text

TEXT = f"{Text.__module__}.{Text.__name__}"


def test_its_files_are_those_of_the_sources_without_a_copy(corpora, single):
    folder = prepare(corpora())
    check_content(folder, load_index(folder))
    for name in ("code", "poems", "prose"):
        source_folder = prepare(single(name))
        for split in ("train", "val"):
            file, linked = (
                source_folder / f"{split}-00000.bin",
                folder / f"{name}-{split}-00000.bin",
            )
            assert file.samefile(linked)


def test_its_index_counts_all_sources(corpora, single):
    index = load_index(prepare(corpora()))
    parts = [load_index(prepare(single(name))) for name in ("code", "poems", "prose")]
    for split in ("train", "val"):
        for of in ("tokens", "text_bytes"):
            wanted = sum(getattr(part.splits[split], of) for part in parts)
            assert getattr(index.splits[split], of) == wanted


def test_a_file_with_an_end_held_out_is_one_document(corpora, caplog):
    caplog.set_level(logging.INFO)
    prepare(corpora())
    assert "prepared mixture: 3 documents, 0.0 MB -> " in caplog.text


def test_weights_and_the_order_of_sources_make_no_other_tokens(corpora):
    folder = prepare(corpora("code prose"))
    assert folder == prepare(corpora("prose code", weights={"code": 5.0, "prose": 0.1}))
    assert folder != prepare(corpora())


def test_a_changed_source_makes_other_tokens_and_a_frozen_mixture_stays(corpora, tmp_path):
    data = corpora("code prose")
    folder = prepare(data)
    frozen = replace(data, fingerprint=load_index(folder).fingerprint)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "prose").write_text("k l m n o p " * 500)
    assert prepare(data) != folder
    for source_folder in (tmp_path / "data").glob("text-*"):
        shutil.rmtree(source_folder)
    assert prepare(frozen) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_mixture_that_is_gone_is_not_replaced_by_other_tokens(corpora, tmp_path):
    data = corpora("code prose")
    frozen = replace(data, fingerprint=load_index(prepare(data)).fingerprint)
    shutil.rmtree(prepare(data))
    assert prepare(frozen) == prepare(data)
    shutil.rmtree(prepare(data))
    (tmp_path / "prose").write_text("k l m n o p " * 500)
    with pytest.raises(UserError, match=r"is missing, and the corpus.+ has changed"):
        prepare(frozen)


def test_without_hard_links_the_files_are_linked_by_name(corpora, monkeypatch):
    def refused(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "link", refused)
    folder = prepare(corpora())
    assert (folder / "code-train-00000.bin").is_symlink()
    check_content(folder, load_index(folder))


def test_two_sources_of_the_same_tokens_are_rejected(corpora, tmp_path):
    again = {"path": str(tmp_path / "code"), "val_fraction": 0.2}
    data = corpora("code", sources={"again": again}, weights={"code": 1.0, "again": 1.0})
    with pytest.raises(
        UserError, match=r"data.source.sources.again and data.source.sources.code are the same"
    ):
        prepare(data)


def test_a_missing_path_is_named_as_the_user_wrote_it(corpora):
    data = corpora(
        "code",
        sources={"more": {"path": "nowhere"}},
        epochs={"code": 1.0, "more": 1.0},
    )
    with pytest.raises(UserError, match=r"^data.source.sources.more.path=nowhere matches no file"):
        prepare(data)


def bpe(tmp_path, name):
    settings = {"path": str(tmp_path / name), "val_fraction": 0.2}
    return {**settings, "tokenizer": "bpe", "vocab_size": 300}


def test_different_tokenizers_are_rejected(corpora, tmp_path):
    pytest.importorskip("tokenizers")
    data = corpora("code prose", sources={"prose": bpe(tmp_path, "prose")})
    line = (
        r"data.source.sources.code and data.source.sources.prose have different tokenizers "
        r"\(bytes of 256 ids and bpe of \d+ ids\), and a model has one; set the same "
        r"data.source.sources.NAME.tokenizer, or "
        "data.source.tokenizer_from=code"
    )
    with pytest.raises(UserError, match=line):
        prepare(data)


@pytest.mark.parametrize("whose", ["code", "prose"])
def test_all_sources_can_use_the_tokenizer_of_one(whose, corpora, tmp_path):
    pytest.importorskip("tokenizers")
    sources = {"prose": bpe(tmp_path, "prose")}
    folder = prepare(corpora("code prose poems", sources=sources, tokenizer_from=whose))
    kind = load_index(folder).tokenizer["kind"]
    assert kind == {"code": "bytes", "prose": "bpe"}[whose]


def test_a_damaged_copy_of_a_tokenizer_is_replaced(corpora, tmp_path):
    pytest.importorskip("tokenizers")
    data = corpora("code prose", sources={"prose": bpe(tmp_path, "prose")}, tokenizer_from="prose")
    folder = prepare(data)
    (copy,) = Path(data.root, "tokenizers").iterdir()
    content = copy.read_bytes()
    copy.write_bytes(content.replace(b"a", b"b", 1))
    assert prepare(replace(data)) == folder
    assert copy.read_bytes() == content


def test_the_index_names_the_state_of_every_source(corpora, single):
    index = json.loads((prepare(corpora()) / "index.json").read_text())
    names = {name: Path(prepare(single(name))).name for name in ("code", "poems", "prose")}
    assert index["settings"]["sources"] == names
