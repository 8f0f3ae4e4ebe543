"""Which targets count: the assistant's texts and the ends of its messages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep_gpt.data.datamodule import TokenDataModule
from lockstep_gpt.data.prepare import prepare
from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.data.windows import gather, open_windows
from lockstep_gpt.extras.chat.answers_only import answers, data_module
from lockstep_gpt.extras.chat.chat_settings import ChatData
from lockstep_gpt.extras.chat.template import ROLES, template_of
from lockstep_gpt.model.functional import IGNORE

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


def test_texts_of_a_mixture_count_in_full(questions, tmp_path):
    data = ChatData(path=str(questions), root=str(tmp_path / "data"))
    folder = prepare(data)
    data.source = "mixture"
    vars(data)["sources"] = {"talk": {"source": "chat"}, "code": {"source": "stdlib"}}
    sizes = {"block_size": 64, "micro_size": 4, "accumulation": 1, "seed": 1}
    module = data_module(data)(folder, **sizes)
    ((stored, real),) = gather(open_windows(folder, "train", 64), [torch.arange(2).numpy()])
    text = torch.full((1, 65), ord("a"), dtype=stored.dtype)
    _, targets = module.on_after_batch_transfer((torch.cat([stored, text]), real + 1), 0)
    assert (targets[2] == ord("a")).all()
    assert (targets[:2] == IGNORE).any(dim=1).all()


def test_packed_documents_keep_their_own_messages():
    """Packed windows have the first token of each document only as a token, not as a target."""
    own = [*BYTES.render([{"role": "assistant", "content": "ab"}], False), 0]
    tokens, targets = torch.tensor([own[:-1] * 2]), torch.tensor([own[1:] * 2])
    expected = [True, True, True, False] * 2
    assert answers(tokens, targets, BYTES)[0].tolist() == expected
