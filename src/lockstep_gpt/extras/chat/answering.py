"""Answers: draws one token after another, for several prompts at once, and turns them into text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch import Tensor

from lockstep_gpt.errors import RunError, UserError
from lockstep_gpt.extras.chat.cache import Cache
from lockstep_gpt.extras.chat.sampling import Sampling
from lockstep_gpt.extras.chat.speech import Speech
from lockstep_gpt.extras.datasets.mask import masks_documents
from lockstep_gpt.model.gpt import GPT

CHUNK = 256  # tokens of a prompt that are read at a time, so that other answers go on meanwhile
SLIDE = 4  # a full row forgets its oldest 1 / SLIDE of the tokens
LARGE = 1 << 24  # weights; with fewer, threads mostly wait for each other


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
        new = self.new
        self.new = ""
        return new

    def draw(self, logits: Tensor) -> None:
        """Append a token that is drawn from `logits`, (1, V), in the host's memory."""
        try:
            token = self.sampling.draw(logits, self.source)
        except RunError as error:
            self.reason = "error"
            self.error = error
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
        self.model = model
        self.cache = Cache(model, rows)
        self.block_size = model.config.block_size
        forgotten = max(1, self.block_size // slide)
        self.reread_size = self.block_size + 1 - forgotten  # with the new token
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

    def add(self, answer: Answer) -> None:
        """Add an answer; there must be a free row."""
        assert self.free
        prompt = answer.prompt[-self.block_size :]
        if masks_documents(self.model):
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
        row = self.answers.index(answer)
        last = len(self.answers) - 1
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
            unread = [answer.unread for answer in growing]
            tokens = torch.tensor(unread, device=self.model.head.device)
            self._draw(growing, self.cache.read(tokens))
        return growing

    def _read(self) -> list[Answer]:
        reading = self.answers[self._growing : self._growing + 1]
        for answer in reading:
            part = answer.unread[:CHUNK]
            answer.unread = answer.unread[CHUNK:]
            tokens = torch.tensor([part], device=self.model.head.device)
            logits = self.cache.read(tokens, first=self._growing)
            if answer.unread:
                return []
            self._draw(reading, logits)
            self._growing += 1
        return reading

    def _draw(self, answers: list[Answer], logits: Tensor) -> None:
        logits = logits.cpu()  # all rows at once, because this waits for the GPU
        for answer, row in zip(answers, logits[:, None], strict=True):
            answer.unread = []
            answer.draw(row)

    def _forget(self, row: int) -> None:
        """Let a full row be read again from the newest tokens, after those that can grow."""
        self._growing -= 1
        answer = self.answers[row]
        recent = [*answer.prompt[-self.block_size :], *answer.ids]
        answer.unread = recent[-self.reread_size :]
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
        RunError: the model's logits are infinite or not numbers.
    """
    with Answering(model) as answering:
        answering.add(answer)
        while not answer.reason:
            answering.step()
            text = answer.take()
            if text:
                yield text
    if answer.error:
        raise answer.error
