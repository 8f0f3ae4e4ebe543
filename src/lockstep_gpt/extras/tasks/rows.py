"""Turns examples into rows of tokens, cut to the model's context, and rows into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.tasks.examples import EXACT, Example, Task
from lockstep_gpt.settings import counted

BATCH_TOKENS = 8192  # in a batch, with padding; the same for any number of ranks


@dataclass(frozen=True)
class Row:
    """One sequence: the log-likelihood of `ids[start:]` is wanted, or the text after `ids`."""

    ids: list[int]
    start: int  # at least 1
    target: str = ""  # exact match: what to generate
    until: tuple[str, ...] = ()  # exact match: before the first of these
    cut: int = 0  # tokens at the beginning that the model doesn't see

    @property
    def cost(self) -> int:
        """Tokens that the model reads for this row."""
        if self.until:  # it reads everything again for each new token
            return len(self.ids) * (len(self.target.encode()) + 1)
        return len(self.ids) - 1


@dataclass(frozen=True)
class Tokenized:
    """A task with the rows of each of its examples."""

    task: Task
    rows: list[list[Row]]

    def cost(self, count: int) -> int:
        """Return how many tokens the model reads for the first `count` examples."""
        return sum(row.cost for rows in self.rows[:count] for row in rows)


def tokenize_task(task: Task, tokenizer: Tokenizer, block_size: int) -> Tokenized:
    """Tokenize a task.

    Raises:
        UserError: the tokenizer has no text, or can't encode one, or a text to score is longer than
            the model's context.
    """
    end = tokenizer.end_of_text
    if end is None:
        raise UserError(
            "tasks need text, which these tokens are not; train on text, or remove them"
        )
    rows = []
    for example in task.examples:
        try:
            rows.append(_rows(example, task, tokenizer, end, block_size))
        except UserError as error:
            raise UserError(f"{example.where or task.name}: {error}") from None
    return Tokenized(task, rows)


def cut_line(tokenized: Tokenized, block_size: int) -> str:
    """Return one line about contexts that don't fit; empty if all do or the task doesn't care."""
    task = tokenized.task
    cut = [max(row.cut for row in rows) for rows in tokenized.rows]
    places = [place for place, tokens in enumerate(cut) if tokens]
    if not places or not task.reports_cuts:
        return ""
    where = task.examples[places[0]].where or f"{task.name}, example {places[0] + 1}"
    return (
        f"{where}: the first {counted(cut[places[0]], 'token')} of the context are cut to fit "
        f"model.block_size={block_size}; this concerns {len(places):,} of "
        f"{counted(len(cut), 'example')}"
    )


def _rows(
    example: Example, task: Task, tokenizer: Tokenizer, end: int, block_size: int
) -> list[Row]:
    if task.kind == EXACT:
        prompt, target = example.prompts[0]
        ids = _encode(tokenizer, prompt) or [end]
        cut = max(0, len(ids) - block_size)
        return [Row(ids[cut:], 1, target, example.until, cut)]
    if task.cut_at in ("prefix", "suffix"):
        sequences = [_encode(tokenizer, context + text) for context, text in example.prompts]
        pairs = _cut_shared([[end, *ids] for ids in sequences], task.cut_at)
    else:
        opening = [end] if task.cut_at == "document" else []
        split = [_pair(tokenizer, *prompt) for prompt in example.prompts]
        pairs = [([*opening, *context], wanted) for context, wanted in split]
    rows = []
    for context, wanted in pairs:
        before = context or [end]  # an empty context is the start of a document
        if len(wanted) > block_size:
            raise UserError(
                f"{len(wanted)} tokens to score are more than model.block_size={block_size}; "
                "shorten the text, or train with a larger block_size"
            )
        cut = max(0, len(before) + len(wanted) - 1 - block_size)
        rows.append(Row([*before[cut:], *wanted], len(before) - cut, cut=cut))
    return rows


def _pair(tokenizer: Tokenizer, context: str, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of both parts; spaces between them belong to the second, as in lm-eval."""
    stripped = context.rstrip()
    ids = _encode(tokenizer, context + text)
    count = min(len(_encode(tokenizer, stripped)), len(ids) - 1)  # a tokenizer may merge all
    return ids[:count], ids[count:]


def _cut_shared(sequences: list[list[int]], at: str) -> list[tuple[list[int], list[int]]]:
    """Cut each sequence where the prefix that all share ends, or where their suffix begins."""
    if at == "prefix":
        count = _alike(sequences)
        return [(ids[:count], ids[count:]) for ids in sequences]
    count = max(1, _alike([ids[::-1] for ids in sequences]))
    return [(ids[:-count], ids[-count:]) for ids in sequences]


def _alike(sequences: list[list[int]]) -> int:
    """Return how many first tokens all sequences share; at least one of each is left over."""
    most = min(map(len, sequences)) - 1
    alike = (len({*tokens}) == 1 for tokens in zip(*sequences, strict=False))
    return min(most, sum(1 for _ in takewhile(bool, alike)))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text).tolist()
    return ids


def batches(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Yield the indices of `rows` in batches of similar lengths, the longest first.

    A batch depends on the rows alone. Ranks share whole batches, so the products that a row is
    part of have the same shapes, and round the same, on any number of ranks.
    """
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place].ids))
    batch: list[int] = []
    for place in order:
        if batch and (len(batch) + 1) * len(rows[batch[0]].ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
