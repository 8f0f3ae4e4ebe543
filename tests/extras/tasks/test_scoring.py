"""What a model says about rows, compared with one row at a time, without padding."""

import pytest
import torch
import torch.nn.functional as F

from lockstep_gpt.data.tokenizer import ByteTokenizer
from lockstep_gpt.extras.tasks import rows as of_rows
from lockstep_gpt.extras.tasks.rows import Row, batches
from lockstep_gpt.extras.tasks.scoring import evaluating, may_match, score_rows

BYTES = ByteTokenizer()


def some_rows(count=40):
    source = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 64, (count,), generator=source).tolist()
    rows = []
    for place, length in enumerate(lengths):
        ids = torch.randint(1, 256, (length,), generator=source).tolist()
        rows.append(Row(ids, 1 + place % (length - 1)))
    return rows


def alone(model, row):
    """The log-likelihood in float64, and whether it is greedy, of one row."""
    logits = model(torch.tensor([row.ids[:-1]]))[0].double()
    log_p = F.log_softmax(logits, dim=-1)[row.start - 1 :]
    wanted = torch.tensor(row.ids[row.start :])
    total = log_p.gather(1, wanted[:, None]).sum()
    return [float(total), float((log_p.argmax(dim=-1) == wanted).all())]


@pytest.mark.parametrize("most", [64, 512, 8192])
def test_a_row_has_the_same_likelihood_in_any_batch(model, monkeypatch, most):
    monkeypatch.setattr(of_rows, "BATCH_TOKENS", most)
    rows = some_rows()
    with evaluating(model):
        expected = torch.tensor([alone(model, row) for row in rows])
        table = score_rows(model, rows, BYTES)
    assert table.dtype == torch.float64
    torch.testing.assert_close(table.float(), expected, rtol=1e-5, atol=1e-4)


def test_the_likeliest_tokens_are_greedy(model):
    prompt = torch.tensor([[*b"abc"]])
    ids = model.generate(prompt, 5, temperature=0)[0].tolist()
    other = [*ids[:-1], (ids[-1] + 1) % 256]
    with evaluating(model):
        table = score_rows(model, [Row(ids, 3), Row(other, 3), Row(ids[:4], 3)], BYTES)
    assert table[:, 1].tolist() == [1, 0, 1]


def test_chunks_of_logits_change_nothing(model, monkeypatch):
    rows = some_rows()
    with evaluating(model):
        together = score_rows(model, rows, BYTES)
        monkeypatch.setattr("lockstep_gpt.extras.tasks.scoring.MANY_LOGITS", 1000)
        parts = score_rows(model, rows, BYTES)
    torch.testing.assert_close(together, parts, rtol=1e-6, atol=1e-5)


def test_ranks_that_share_the_batches_have_all_rows_together(model, monkeypatch):
    monkeypatch.setattr(of_rows, "BATCH_TOKENS", 300)
    rows = some_rows()
    count = sum(1 for _ in batches(rows))
    with evaluating(model):
        together = score_rows(model, rows, BYTES)
        for ranks in (2, 3):
            parts = [
                score_rows(model, rows, BYTES, range(rank, count, ranks)) for rank in range(ranks)
            ]
            assert torch.equal(sum(parts), together)
            assert all((part == 0).any() for part in parts)


class Writes(torch.nn.Module):
    """A model that continues any prompt with the same text."""

    def __init__(self, text, block_size=8):
        super().__init__()
        self.head = torch.nn.Parameter(torch.eye(256))
        self.vocab_size, self.text = 256, [*text.encode()]
        self.config = type("Config", (), {"block_size": block_size})
        self.reads = []

    def features(self, tokens):
        self.reads.append(tokens.shape)
        step = len(self.reads) - 1
        return F.one_hot(torch.full(tokens.shape, self.text[step]), 256).float()


@pytest.mark.parametrize(
    ("written", "target", "until", "hit", "steps"),
    [
        ("42\n!", "42", ["\n"], True, 3),
        ("42 \n", "42", ["\n"], False, 3),  # as soon as it can't match
        ("43\n", "42", ["\n"], False, 2),
        ("4\n", "42", ["\n"], False, 2),
        ("42\0", "42", ["\n"], True, 3),  # the end of the document is also a stop
        ("é##", "é", ["##"], True, 4),
        ("é#x#", "é", ["##", "#x"], True, 4),
        ("ab. c", "ab", [";", ". "], True, 4),
    ],
)
def test_an_exact_match_ends_before_the_first_stop(written, target, until, hit, steps):
    model = Writes(written)
    row = Row([*b"0123456"], 1, target, tuple(until))
    assert score_rows(model, [row], BYTES).tolist() == [[0, hit]]
    assert len(model.reads) == steps
    assert max(shape[1] for shape in model.reads) <= 8  # a window of the context moves on


def test_an_exact_match_is_what_generate_writes(model):
    prompt = b"abc"
    new = model.generate(torch.tensor([[*prompt]]), 12, temperature=0)[0, 3:].tolist()
    text = BYTES.decode(new)
    stop = text[6]
    target = text[: text.index(stop)] or text[0]
    rows = [
        Row([*prompt], 1, target, (stop,)),
        Row([*prompt], 1, target + "x", (stop,)),
    ]
    with evaluating(model):
        hits = score_rows(model, rows, BYTES)[:, 1].tolist()
    assert hits == [float(text.index(stop) > 0), 0]


def test_text_that_may_still_match_goes_on():
    row = Row([1], 1, "yes", ("\n\n", "END"))
    for text in ("", "y", "yes", "yes\n", "yesE", "ye�"):
        assert may_match(text, row), text
    for text in ("n", "yesx", "yes\nE", "es"):
        assert not may_match(text, row), text


def test_evaluating_gives_each_module_its_own_mode_back(model):
    model.train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    seen = []

    def fail():
        seen.extend(module.training for module in model.modules())
        seen.append(torch.is_grad_enabled())
        raise KeyError

    with pytest.raises(KeyError), evaluating(model):
        fail()
    assert not any(seen)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    model.eval()
