"""What a model says about rows: log-likelihoods, greedy tokens, greedy continuations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.extras.tasks.rows import Row, batches
from lockstep_gpt.model.functional import MANY_LOGITS, project_to_vocabulary

SPECIAL = 8  # tokens of an answer that may have no text, before it counts as wrong


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off; give each module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def score_rows(
    model: Any, rows: Sequence[Row], tokenizer: Tokenizer, mine: Iterable[int] | None = None
) -> Tensor:
    """Return what the model says about each row: (rows, 2), float64, on the host.

    The columns are the log-likelihood in nats of `ids[start:]`, and 1 if these are the likeliest
    tokens; for rows to continue, 0 and 1 if the greedy continuation is the target. Only batches
    whose number is in `mine` are computed, None: all; the other rows are zero.
    """
    table = torch.zeros(len(rows), 2, dtype=torch.float64)
    chosen = None if mine is None else {*mine}
    for number, places in enumerate(batches(rows)):
        if chosen is None or number in chosen:
            batch = [rows[place] for place in places]
            if batch[0].until:
                hits = _continued(model, batch, tokenizer)
                table[places] = torch.tensor([[0.0, float(hit)] for hit in hits]).double()
            else:
                table[places] = _likelihoods(model, batch)
    return table


def _likelihoods(model: Any, rows: Sequence[Row]) -> Tensor:
    """Return (B, 2): log-likelihood and whether greedy, for a batch of B rows."""
    device = next(model.parameters()).device
    features = model.features(_padded([row.ids[:-1] for row in rows]).to(device))  # (B, T, C)
    spots = [(at, spot) for at, row in enumerate(rows) for spot in range(row.start, len(row.ids))]
    batch, position = torch.tensor(spots, device=device).T  # (N)
    targets = torch.tensor([rows[at].ids[spot] for at, spot in spots], device=device)
    features = features[batch, position - 1]  # (N, C)
    parts = []
    size = max(1, MANY_LOGITS // model.vocab_size)
    for start in range(0, len(spots), size):
        part = features[start : start + size]
        logits = project_to_vocabulary(part, model.head, model.vocab_size).float()
        wanted = targets[start : start + size]
        log_p = logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0]
        parts.append(torch.stack([log_p, (logits.argmax(dim=-1) == wanted).float()]).cpu())
    log_p, hits = torch.cat(parts, dim=1).double()
    result = torch.empty(len(rows), 2, dtype=torch.float64)
    end = 0
    for at, row in enumerate(rows):
        start = end
        end += len(row.ids) - row.start
        result[at, 0] = _total(log_p[start:end].tolist())
        result[at, 1] = hits[start:end].min()
    return result


def _continued(model: Any, rows: Sequence[Row], tokenizer: Tokenizer) -> list[bool]:
    """Continue rows greedily; return which continuations are the target up to a stop."""
    device = next(model.parameters()).device
    size = model.config.block_size
    texts = [[*row.ids] for row in rows]
    hits = [False] * len(rows)
    active = [*range(len(rows))]
    while active:
        windows = [texts[at][-size:] for at in active]
        features = model.features(_padded(windows).to(device))  # (B, T, C)
        ends = torch.tensor([len(window) - 1 for window in windows], device=device)
        last = features[torch.arange(len(active), device=device), ends]
        logits = project_to_vocabulary(last, model.head, model.vocab_size)
        still = []
        for at, token in zip(active, logits.argmax(dim=-1).tolist(), strict=True):
            row = rows[at]
            is_over = token == tokenizer.end_of_text
            if not is_over:
                texts[at].append(token)
            new = texts[at][len(row.ids) :]
            text = tokenizer.decode(new)
            stops = [text.index(stop) for stop in row.until if stop in text]
            if stops or is_over:
                answer = text[: min(stops, default=len(text))]
                hits[at] = answer == row.target
            elif may_match(text, row) and len(new) < _most(row):
                still.append(at)
        active = still
    return hits


def may_match(text: str, row: Row) -> bool:
    """Return whether a continuation that begins with `text` can still be the target and a stop."""
    text = text.rstrip("�")  # a character of which some bytes are missing
    rest = text.removeprefix(row.target)
    if text.startswith(row.target):
        return any(stop.startswith(rest) for stop in row.until)
    return row.target.startswith(text)


def _most(row: Row) -> int:
    """Return how many tokens a right answer has at most: one for each byte."""
    return len(row.target.encode()) + max(len(stop.encode()) for stop in row.until) + SPECIAL


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return (B, T), padded at the end, which no earlier position sees."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def _total(values: list[float]) -> float:
    """Return the sum, rounded once; NaN or infinite values stay what they are."""
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    return sum(values)
