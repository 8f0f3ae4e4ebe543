"""Answers: draws one token after another, for several prompts at once, and turns them into text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from lockstep_gpt.config import RunError, UserError
from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.extras.chat.cache import Cache
from lockstep_gpt.model.gpt import GPT

CHUNK = 256  # tokens of a prompt that are read at a time, so that other answers go on meanwhile
SLIDE = 4  # a full row forgets its oldest 1 / SLIDE of the tokens
COLD = 1e-6  # a lower temperature picks the likeliest token: a quotient would overflow
LARGE = 1 << 24  # weights; with fewer, threads mostly wait for each other
INCOMPLETE = "\ufffd"  # how a character of which bytes are missing is decoded


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Args:
        temperature: divides the logits; 0 picks the likeliest token.
        top_k: draws from the k likeliest tokens; None: from all.
        top_p: of these, draws from the likeliest whose probabilities add up to this (Holtzman et
            al. 2020).
        seed: of the random numbers; the same seed draws as `GPT.generate` does.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1337

    def __post_init__(self) -> None:
        for name, value, fits, rule in (
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k is None or self.top_k >= 1, "at least 1"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed < 2**63, f"from 0 to {2**63 - 1}"),
        ):
            if not fits or not math.isfinite(value or 0):
                raise UserError(f"{name}={value} must be {rule}")

    def draw(self, logits: Tensor, source: torch.Generator) -> int:
        """Return a token, drawn from `logits`, (1, V)."""
        if bool(logits.isnan().any()):
            raise RunError("the model's logits are not numbers; use another checkpoint")
        logits = logits.float().cpu()
        if self.temperature < COLD:
            return int(logits.argmax())
        if self.top_k is not None:
            weakest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < weakest, -math.inf)
        likely = ((logits - logits.max()) / self.temperature).softmax(dim=-1)
        if self.top_p < 1:
            falling, order = likely.sort(descending=True)
            needless = falling.cumsum(dim=-1) - falling >= self.top_p  # never the first
            likely = likely.scatter(-1, order, falling.masked_fill(needless, 0))
        return int(torch.multinomial(likely, 1, generator=source))


class Speech:
    """Turns tokens into text as they come: whole characters, up to the first stop sequence."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.stopped = False
        self._ids: list[int] = []  # since the last whole character
        self._told = 0  # characters of these that were already taken
        self._held = ""  # may be the beginning of a stop sequence

    def add(self, token: int) -> str:
        """Return the text that is certain after one more token."""
        self._ids.append(token)
        text = self.tokenizer.decode(self._ids)
        whole = text.removesuffix(INCOMPLETE)
        new, self._told = whole[self._told :], len(whole)
        if whole == text:
            self._ids, self._told = [], 0
        return self._until_stop(new, last=False)

    def end(self) -> str:
        """Return the rest, in which a character that was not completed is U+FFFD."""
        return self._until_stop(self.tokenizer.decode(self._ids)[self._told :], last=True)

    def _until_stop(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.stopped = True
            return text[: min(places)]
        begun = 0 if last else max((_begun(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)


@dataclass(eq=False)
class Answer:
    """One answer, as it grows.

    Args:
        prompt: the ids to continue, at least one.
        limit: most new tokens.
        speech: the text of the new tokens.
        sampling: how they are drawn.
        stops: ids that end the answer; they are not part of its text.
    """

    prompt: list[int]
    limit: int
    speech: Speech
    sampling: Sampling = field(default_factory=Sampling)
    stops: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)  # the new tokens, except one of `stops`
    new: str = ""  # text that nobody has taken yet
    reason: str = ""  # why it ended: "stop" or "length"
    error: RunError | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("the prompt is empty; give at least one token")
        self.source = torch.Generator().manual_seed(self.sampling.seed)
        self.unread: list[int] = []  # tokens that its row of the cache doesn't contain yet

    def take(self) -> str:
        """Return the new text, once."""
        new, self.new = self.new, ""
        return new

    def draw(self, logits: Tensor) -> None:
        """Append a token that is drawn from `logits`, (1, V)."""
        try:
            token = self.sampling.draw(logits, self.source)
        except RunError as error:
            self.reason, self.error = "error", error
            return
        if token in self.stops:
            self.reason = "stop"
        else:
            self.ids.append(token)
            self.unread.append(token)
            self.new += self.speech.add(token)
        if self.reason or len(self.ids) >= self.limit:
            self.reason = self.reason or "length"
            self.new += self.speech.end()
        if self.speech.stopped:
            self.reason = "stop"


class Answering:
    """Continues several prompts together: each step adds one token to every answer.

    The prompts of new answers are read between these steps, a part at a time. A context that is
    full forgets its oldest quarter and is read again, so the model always sees at least the last
    three quarters of `block_size`; `GPT.generate` reads the whole block for each token instead.

    Args:
        model: a GPT in evaluation mode.
        rows: how many answers grow at the same time.
        slide: a full context forgets 1 / slide of its tokens.
    """

    def __init__(self, model: GPT, rows: int = 1, slide: int = SLIDE) -> None:
        self.model, self.cache = model, Cache(model, rows)
        self.block_size = model.config.block_size
        self.kept = self.block_size + 1 - max(1, self.block_size // slide)  # with the new token
        self.answers: list[Answer] = []  # by row: those that grow, then those still to be read
        self._growing = 0
        self._threads = torch.get_num_threads()

    def __enter__(self) -> Answering:
        self._threads = torch.get_num_threads()
        if self.model.num_parameters < LARGE:
            torch.set_num_threads(1)
        self.cache.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cache.__exit__(kind, error, trace)
        torch.set_num_threads(self._threads)
        self.answers.clear()
        self._growing = 0

    @property
    def free(self) -> int:
        """How many more answers can begin."""
        return self.cache.rows - len(self.answers)

    def begin(self, answer: Answer) -> None:
        """Add an answer; there must be a free row."""
        assert self.free
        prompt = answer.prompt[-self.block_size :]
        if getattr(self.model.config, "mask_documents", False):
            prompt = _last_document(prompt, answer.speech.tokenizer.end_of_text)
        answer.unread = prompt
        self.answers.append(answer)

    def step(self) -> list[Answer]:
        """Add a token to each answer that grows, and read a part of a prompt; return the changed.

        An answer that has ended is removed.
        """
        changed = [*self._grow(), *self._read()]
        for answer in changed:
            if answer.reason:
                self.end(answer)
        return changed

    def end(self, answer: Answer) -> None:
        """Remove an answer; the others stay in rows without gaps."""
        row, last = self.answers.index(answer), len(self.answers) - 1
        if row < self._growing:
            self._growing -= 1
            self._move(self._growing, row)
            row = self._growing
        self._move(last, row)
        self.answers.pop()
        self.cache.clear(last)

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self.cache.move(source, target)
            self.answers[target] = self.answers[source]

    def _grow(self) -> list[Answer]:
        for row in reversed(range(self._growing)):
            if self.cache.lengths[row] == self.block_size:
                self._forget(row)
        growing = self.answers[: self._growing]
        if growing:
            device = self.model.head.device
            logits = self.cache.read(torch.tensor([each.unread for each in growing], device=device))
            self._draw(growing, logits)
        return growing

    def _read(self) -> list[Answer]:
        reading = self.answers[self._growing : self._growing + 1]
        for answer in reading:
            part, answer.unread = answer.unread[:CHUNK], answer.unread[CHUNK:]
            tokens = torch.tensor([part], device=self.model.head.device)
            logits = self.cache.read(tokens, first=self._growing)
            if answer.unread:
                return []
            self._draw(reading, logits)
            self._growing += 1
        return reading

    def _draw(self, answers: list[Answer], logits: Tensor) -> None:
        for answer, row in zip(answers, logits.split(1), strict=True):
            answer.unread = []
            answer.draw(row)

    def _forget(self, row: int) -> None:
        """Let a full row be read again from the newest tokens, after those that can grow."""
        self._growing -= 1
        answer = self.answers[row]
        recent = [*answer.prompt[-self.block_size :], *answer.ids]
        answer.unread = recent[-self.kept :]
        self.cache.clear(row)
        self._move(self._growing, row)
        self.answers[self._growing] = answer


def _last_document(prompt: list[int], end_of_text: int | None) -> list[int]:
    """Return the document of the last token, which is all that it sees if they are masked."""
    ends = [place for place, token in enumerate(prompt[:-1]) if token == end_of_text]
    return prompt[max(ends, default=-1) + 1 :]


def stream(model: GPT, answer: Answer) -> Iterator[str]:
    """Yield the text of one answer as it grows.

    Raises:
        RunError: the model's logits are not numbers.
    """
    with Answering(model) as answering:
        answering.begin(answer)
        while not answer.reason:
            answering.step()
            if text := answer.take():
                yield text
    if answer.error:
        raise answer.error
