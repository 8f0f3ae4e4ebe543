"""Which targets count: the assistant's texts and the ends of its messages."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.shards import open_split
from lockstep_gpt.data.sources.text import Text
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.answers_only import answer_mask
from lockstep_gpt.extras.chat.conversations import Conversations, messages_of
from lockstep_gpt.extras.chat.template import ROLES, template_of
from lockstep_gpt.model.functional import IGNORE

PACKING = "lockstep_gpt.extras.datasets.whole_documents"
ABSENT = "no such extra"
TEXT, TALK = (f"{source.__module__}.{source.__name__}" for source in (Text, Conversations))
CPU = torch.device("cpu")
BYTES = template_of(ByteTokenizer())
TEXTS = st.text("ab", max_size=5)
MESSAGES = st.lists(st.tuples(st.sampled_from(ROLES), TEXTS), min_size=1, max_size=5)


def counted(ids, template):
    """Return which ids of one row are targets that count; the first never is one."""
    row = torch.tensor([ids])
    return [False, *answer_mask(row[:, :-1], row[:, 1:], template)[0].tolist()]


def by_message(template, conversations):
    """Return the ids of conversations, and which count, message by message."""
    ids, counts = [], []
    for messages in conversations:
        for role, text in messages:
            source = [*template.plain(text), template.end]
            ids += [*template.openings[role], *source, *template.between]
            counts += [False] * len(template.openings[role]) + [role == "assistant"] * len(source)
            counts += [False] * len(template.between)
        ids.append(template.tokenizer.end_of_text)
        counts.append(False)
    return ids, counts


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_answers_and_their_ends_count_and_nothing_else(conversations):
    ids, counts = by_message(BYTES, conversations)
    assert counted(ids, BYTES) == counts


def test_the_same_holds_for_chatml(chatml):
    template = template_of(chatml)
    talk = [[("system", "add"), ("user", "3"), ("assistant", "\n4 <|im_end|>"), ("user", "")]] * 2
    ids, counts = by_message(template, talk)
    assert counted(ids, template) == counts
    assert sum(counts) > 2


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_window_loses_at_most_what_comes_before_its_first_opening(conversations, data):
    ids, counts = by_message(BYTES, conversations)
    start = data.draw(st.integers(0, len(ids) - 1))
    result = counted(ids[start:], BYTES)
    openings = [place for place, token in enumerate(ids) if 0xF8 <= token <= 0xFA]
    first = next((place for place in openings if place >= start), len(ids))
    assert result == [False] * (first - start) + counts[first:]


def test_a_cut_answer_does_not_learn_to_end():
    ids = [*BYTES.render([{"role": "user", "content": "a"}], True), *b"ab", 0, *b"c"]
    expected = [False] * 4 + [True, True, False, False]
    assert counted(ids, BYTES) == expected


def test_batches_have_only_answers_as_targets(questions, module_of, tmp_path):
    module = module_of(
        Conversations(path=str(questions), root=str(tmp_path / "data")), block_size=64
    )
    assert module.may_ignore
    (batch,) = module.windows["train"].gather([torch.arange(4).numpy()])
    stored = batch.ids
    tokens, targets = module.on_after_batch_transfer(batch._replace(real=batch.real - 1), 0)
    assert torch.equal(tokens[:3], stored[:3, :-1].long())
    assert (targets[3] == IGNORE).all()
    counts = torch.tensor([counted(row, BYTES)[1:] for row in stored[:3].tolist()])
    assert torch.equal(targets[:3] != IGNORE, counts)
    assert torch.equal(targets[:3][counts], stored[:3, 1:].long()[counts])
    assert 0.2 < counts.float().mean() < 0.6


def test_in_other_sources_all_targets_count(questions):
    assert Text(path=str(questions)).target_masks(ByteTokenizer()) == {}


@pytest.fixture
def talk_and_prose(tmp_path):
    """Return the settings of a source of conversations, some of them long, and of one of texts."""
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        question, answer = (
            "".join(draw.choices("abcd ", k=draw.choice([3, 90]))) for _ in range(2)
        )
        lines.append(json.dumps({"prompt": question, "completion": answer}))
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    (tmp_path / "prose").mkdir()
    for number in range(60):
        text = "".join(draw.choices("klmn ", k=number))
        (tmp_path / "prose" / f"{number}.txt").write_text(text)
    held = {"val_fraction": 0.2}
    return {
        "prose": {"_target_": TEXT, "path": str(tmp_path / "prose"), **held},
        "talk": {"_target_": TALK, "path": str(tmp_path / "talk.jsonl"), **held},
    }


@pytest.fixture
def all_windows(module_of):
    """Return tokens and targets of all windows of a split, (N, 2, T), through the data module."""

    def read(source, packing=None, split="train"):
        module = module_of(source, packing=packing)
        rows = torch.arange(sum(module.windows[split].counts.values())).split(7)
        batches = module.batches(split, [row.numpy() for row in rows], CPU)
        return torch.cat([torch.stack(batch, 1) for batch in batches])

    return read


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_mixture_counts_what_each_source_counts_alone(
    packing, talk_and_prose, all_windows, tmp_path
):
    mixture = pytest.importorskip("lockstep_gpt.extras.datasets.mixture", reason=ABSENT)
    packings = pytest.importorskip(PACKING, reason=ABSENT)
    packing = packings.WholeDocuments() if packing == "documents" else None
    root = str(tmp_path / "data")
    alone = [
        kind(**{**talk_and_prose[name], "root": root})
        for name, kind in (("prose", Text), ("talk", Conversations))
    ]
    parts = [all_windows(source, packing) for source in alone]
    weights = dict.fromkeys(talk_and_prose, 1.0)
    mixed = mixture.Mixture(sources=talk_and_prose, weights=weights, root=root)
    assert torch.equal(all_windows(mixed, packing), torch.cat(parts))
    tokens, targets = parts[1].unbind(1)
    unmarked = (tokens < 0xF8).all(dim=1)
    assert unmarked.any(), "the middle of a long message"
    assert (targets[unmarked] == IGNORE).all()
    assert (targets != IGNORE).any()


def counts_of_documents(path):
    """Return, for the ids of each conversation with its end, which of them may be targets."""
    counts_of = {}
    for line in path.read_bytes().splitlines():
        talk = [(message["role"], message["content"]) for message in messages_of(line, "a")]
        ids, counts = by_message(BYTES, [talk])
        counts_of[tuple(ids)] = counts
    return counts_of


def pieces_of(ids, counts):
    """Return a piece's tokens and targets; nothing counts before the first opening in it."""
    opened = np.maximum.accumulate(ids >= 0xF8)
    return ids[:-1], np.where(counts[1:] & opened[:-1], ids[1:], IGNORE)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_packed_mixture_has_the_targets_of_its_unpacked_documents(
    split, talk_and_prose, all_windows, tmp_path
):
    mixture = pytest.importorskip("lockstep_gpt.extras.datasets.mixture", reason=ABSENT)
    packing = pytest.importorskip(PACKING, reason=ABSENT)
    weights = dict.fromkeys(talk_and_prose, 1.0)
    mixed = mixture.Mixture(sources=talk_and_prose, weights=weights, root=str(tmp_path / "data"))
    result = all_windows(mixed, packing.WholeDocuments(), split)
    folder = prepare(mixed)
    known = counts_of_documents(tmp_path / "talk.jsonl")
    rows, answered = [], 0
    for name in ("prose", "talk"):
        ids = np.asarray(open_split(folder, f"{name}/{split}")).astype(np.int64)
        counts = np.ones(len(ids), bool)
        if name == "talk":
            documents = [(*text, 0) for text in bytes(ids.astype(np.uint8)).split(b"\0")[:-1]]
            counts = np.concatenate([known[document] for document in documents])
            answered = int(counts.sum())
        starts, lengths, first = packing.open_pieces(folder / "packed-16", f"{name}/{split}")
        for first_piece, last_piece in pairwise(first.tolist()):
            tokens, targets = np.full(16, 1), np.full(16, IGNORE)
            place = 0
            for start, length in zip(
                starts[first_piece:last_piece], lengths[first_piece:last_piece], strict=True
            ):
                span = slice(place, place + length)
                piece = slice(start, start + length + 1)
                tokens[span], targets[span] = ids[piece][:-1], ids[piece][1:]
                if name == "talk":
                    tokens[span], targets[span] = pieces_of(ids[piece], counts[piece])
                place += length
            rows.append([tokens, targets])
    assert np.array_equal(result.numpy(), np.array(rows))
    of_talk = result[[bool((row[0] >= 0xF8).any()) for row in result]]
    assert 0 < int((of_talk[:, 1] != IGNORE).sum()) < answered, "some openings are cut off"


@pytest.mark.parametrize("val_tokens", [None, 1])
def test_a_validation_without_answers_is_one_line(val_tokens, module_of, tmp_path):
    path = tmp_path / "a.jsonl"
    pairs = [{"prompt": f"{number} " * 20, "completion": "yes"} for number in range(200)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    root = str(tmp_path / "data")
    data = Conversations(path=str(path), root=root, longest=32, val_fraction=0.2)
    with pytest.raises(UserError, match=r"validation windows? used have no token of an ans") as e:
        module_of(data, block_size=32, val_tokens=val_tokens)
    assert "\n" not in str(e.value)
    assert module_of(replace(data, longest=None), block_size=32).val_windows


def test_packed_documents_keep_their_own_messages():
    """Packed windows have the first token of each document only as a token, not as a target."""
    source = [*BYTES.render([{"role": "assistant", "content": "ab"}], False), 0]
    tokens, targets = torch.tensor([source[:-1] * 2]), torch.tensor([source[1:] * 2])
    expected = [True, True, True, False] * 2
    assert answer_mask(tokens, targets, BYTES)[0].tolist() == expected
