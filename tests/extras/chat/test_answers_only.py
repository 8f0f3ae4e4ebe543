"""Which targets count: the assistant's texts and the ends of its messages."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.config import UserError, data_sources
from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.data.windows import gather, open_windows
from lockstep_gpt.extras.chat.answers_only import answers, data_module
from lockstep_gpt.extras.chat.chat_settings import ChatData
from lockstep_gpt.extras.chat.template import ROLES, template_of
from lockstep_gpt.model.functional import IGNORE
from lockstep_gpt.registry import asked

ABSENT = "no such extra: sources"
BYTES = template_of(ByteTokenizer())
TEXTS = st.text("ab", max_size=5)
MESSAGES = st.lists(st.tuples(st.sampled_from(ROLES), TEXTS), min_size=1, max_size=5)


def counted(ids, template):
    """Return which ids of one row are targets that count; the first never is one."""
    row = torch.tensor([ids])
    return [False, *answers(row[:, :-1], row[:, 1:], template)[0].tolist()]


def by_message(template, conversations):
    """Return the ids of conversations, and which count, message by message."""
    ids, counts = [], []
    for messages in conversations:
        for role, text in messages:
            own = [*template.plain(text), template.end]
            ids += [*template.openings[role], *own, *template.between]
            counts += [False] * len(template.openings[role]) + [role == "assistant"] * len(own)
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
    found = counted(ids[start:], BYTES)
    openings = [place for place, each in enumerate(ids) if 0xF8 <= each <= 0xFA]
    first = next((place for place in openings if place >= start), len(ids))
    assert found == [False] * (first - start) + counts[first:]


def test_a_cut_answer_does_not_learn_to_end():
    ids = [*BYTES.render([{"role": "user", "content": "a"}], True), *b"ab", 0, *b"c"]
    expected = [False] * 4 + [True, True, False, False]
    assert counted(ids, BYTES) == expected


def test_batches_have_only_answers_as_targets(questions, tmp_path):
    data = ChatData(path=str(questions), root=str(tmp_path / "data"))
    sizes = {"block_size": 64, "micro_size": 4, "accumulation": 1, "seed": 1}
    folder = prepare(data)
    module = data_module(data)(folder, **sizes)
    assert isinstance(module, TokenDataModule)
    windows = open_windows(folder, "train", 64)
    ((stored, real),) = gather(windows, [torch.arange(4).numpy()])
    tokens, targets = module.on_after_batch_transfer((stored, real - 1), 0)
    assert torch.equal(tokens[:3], stored[:3, :-1].long())
    assert (targets[3] == IGNORE).all()
    counts = torch.tensor([counted(row, BYTES)[1:] for row in stored[:3].tolist()])
    assert torch.equal(targets[:3] != IGNORE, counts)
    assert torch.equal(targets[:3][counts], stored[:3, 1:].long()[counts])
    assert 0.2 < counts.float().mean() < 0.6


@pytest.mark.parametrize("workers", [0, 2])
def test_other_kinds_of_data_stay_what_they_are(questions, tmp_path, workers):
    from lockstep_gpt.config import TextData

    assert data_module(TextData(path=str(questions))) is None
    if workers:
        pytest.importorskip("lockstep_gpt.extras.sources", reason=ABSENT)
    data = ChatData(path=str(questions), root=str(tmp_path / "data"))
    vars(data)["num_workers"] = workers  # as a source with loader processes has it
    sizes = {"block_size": 64, "micro_size": 4, "accumulation": 1, "seed": 1}
    module = data_module(data)(prepare(data), **sizes)
    assert getattr(module, "workers", 0) == workers


@pytest.fixture
def talk_and_prose(tmp_path):
    """Return the settings of a source of conversations, some of them long, and of one of texts."""
    draw = random.Random(0)
    lines = []
    for _ in range(60):
        asked, answer = ("".join(draw.choices("abcd ", k=draw.choice([3, 90]))) for _ in range(2))
        lines.append(json.dumps({"prompt": asked, "completion": answer}))
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    (tmp_path / "prose").mkdir()
    for number in range(60):
        text = "".join(draw.choices("klmn ", k=number))
        (tmp_path / "prose" / f"{number}.txt").write_text(text)
    held = {"val_fraction": 0.2}
    return {
        "prose": {"source": "text", "path": str(tmp_path / "prose"), **held},
        "talk": {"source": "chat", "path": str(tmp_path / "talk.jsonl"), **held},
    }


def all_windows(data):
    """Return tokens and targets of all windows of train, through the data module."""
    folder = prepare(data)
    config = SimpleNamespace(data=data, model=SimpleNamespace(block_size=16))
    asked("PREPARED", folder, config)
    kind = next(filter(None, asked("DATA_MODULE", data)), TokenDataModule)
    module = kind(folder, block_size=16, micro_size=4, accumulation=1, seed=1)
    cpu = torch.device("cpu")
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=cpu))
    rows = torch.arange(module.train_windows).split(7)
    feed = module.feed("train", lambda *_: [each.numpy() for each in rows])
    moved = (module.transfer_batch_to_device(each, cpu, 0) for each in feed)
    batches = [module.on_after_batch_transfer(each, 0) for each in moved]
    return torch.cat([torch.stack(each, 1) for each in batches])


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_a_mixture_counts_what_each_source_counts_alone(packing, talk_and_prose, tmp_path):
    kinds, own = data_sources(), {"root": str(tmp_path / "data")}
    if "mixture" not in kinds:
        pytest.skip("no such extra: mixtures")
    if packing == "documents":
        if "packing" not in kinds["text"].names("kept"):
            pytest.skip("no such extra: documents")
        own["packing"] = packing
    each = [all_windows(kinds[one["source"]](**one, **own)) for one in talk_and_prose.values()]
    weights = dict.fromkeys(talk_and_prose, 1.0)
    mixed = all_windows(kinds["mixture"](sources=talk_and_prose, weights=weights, **own))
    assert torch.equal(mixed, torch.cat(each))
    tokens, targets = each[1].unbind(1)
    unmarked = (tokens < 0xF8).all(dim=1)
    assert unmarked.any(), "the middle of a long message"
    assert (targets[unmarked] == IGNORE).all()
    assert (targets != IGNORE).any()


@pytest.mark.parametrize("val_tokens", [None, 1])
def test_a_validation_without_answers_is_one_line(val_tokens, tmp_path):
    path = tmp_path / "a.jsonl"
    pairs = [{"prompt": f"{number} " * 20, "completion": "yes"} for number in range(200)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    data = ChatData(path=str(path), root=str(tmp_path / "data"), longest=32, val_fraction=0.2)
    folder = prepare(data)
    sizes = {"block_size": 32, "micro_size": 4, "accumulation": 1, "seed": 1}
    with pytest.raises(UserError, match=r"validation windows? used have no token of an ans") as e:
        data_module(data)(folder, **sizes, val_tokens=val_tokens)
    assert "\n" not in str(e.value)
    data = replace(data, longest=None)
    module = data_module(data)(prepare(data), **sizes)
    assert module.trainer is None


def test_packed_documents_keep_their_own_messages():
    """Packed windows have the first token of each document only as a token, not as a target."""
    own = [*BYTES.render([{"role": "assistant", "content": "ab"}], False), 0]
    tokens, targets = torch.tensor([own[:-1] * 2]), torch.tensor([own[1:] * 2])
    expected = [True, True, True, False] * 2
    assert answers(tokens, targets, BYTES)[0].tolist() == expected
