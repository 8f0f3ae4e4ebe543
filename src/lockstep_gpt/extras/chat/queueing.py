"""The thread that computes all answers of the server, and the queue in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator

from lockstep_gpt.errors import RunError
from lockstep_gpt.extras.chat.answering import Answer, Answering
from lockstep_gpt.model.gpt import GPT

FIRST_GUESS = 1.0  # seconds of an answer, before one has ended
RECENT = 0.1  # weight of the newest answer in the mean duration
LONGEST_RETRY = 60  # seconds


class Busy(Exception):  # noqa: N818 (an answer of the server, not a fault)
    """The queue is full, or a request waited for too long; `retry` is in seconds."""

    def __init__(self, reason: str, retry: int) -> None:
        super().__init__(reason)
        self.retry = retry


class Stopping(Exception):  # noqa: N818
    """The server ends before the answer does."""


class Job:
    """A request in the queue; iterate over it for pieces of text.

    Raises while iterating:
        Busy: it waited for too long.
        Stopping: the server ends.
        RunError: the computation failed.
    """

    def __init__(self, answer: Answer, seconds: float) -> None:
        self.answer = answer
        self.begun = time.monotonic()
        self.deadline = self.begun + seconds
        self.is_gone = False
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    def deliver(self, *pieces: str | Exception | None) -> None:
        """Deliver pieces from another thread than the reader's; None is the end."""

        def put() -> None:
            for piece in pieces:
                self._pieces.put_nowait(piece)

        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader anymore
            self._loop.call_soon_threadsafe(put)

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self._pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class AnsweringThread:
    """Answers up to `rows` requests together, while up to `waiting` wait for their turn.

    Args:
        model: in evaluation mode; only this thread uses it from now on.
        rows: requests that are answered at the same time.
        waiting: requests that wait, in the order in which they came.
        seconds: of a request, waiting included; its answer ends there, as at `max_tokens`.
    """

    def __init__(self, model: GPT, rows: int, waiting: int, seconds: float) -> None:
        self.model = model
        self.rows = rows
        self.waiting = waiting
        self.seconds = seconds
        self._queue: deque[Job] = deque()
        self._jobs: dict[Answer, Job] = {}  # being answered
        self._changed = threading.Condition()
        self._stopped = False
        self._mean = FIRST_GUESS  # seconds of an answer
        self._thread = threading.Thread(target=self._run, name="answering", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """End all answers with `Stopping`, and the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def counts(self) -> dict[str, int]:
        """Return how many requests are being answered, and how many wait."""
        with self._changed:
            return {"answering": len(self._jobs), "waiting": len(self._queue)}

    def submit(self, answer: Answer) -> Job:
        """Queue an answer, from the event loop; raise `Busy` if the queue is full."""
        job = Job(answer, self.seconds)
        with self._changed:
            if self._stopped:
                raise Stopping("the server ends; try again later")
            if len(self._jobs) + len(self._queue) >= self.rows + self.waiting:
                raise Busy(
                    f"{self.rows} requests are being answered and {self.waiting} wait, which is "
                    "the limit; try again later",
                    self._retry(),
                )
            self._queue.append(job)
            self._changed.notify()
        return job

    def leave(self, job: Job) -> None:
        """Drop a job that nobody reads anymore; a no-op for one that has ended."""
        with self._changed:
            job.is_gone = True
            self._changed.notify()

    def _retry(self) -> int:
        turns = (len(self._queue) + self.rows) / self.rows
        return max(1, min(LONGEST_RETRY, round(turns * self._mean)))

    def _run(self) -> None:
        while not self._stopped:
            try:
                with Answering(self.model, self.rows) as answering:
                    while self._admit(answering):
                        self._step(answering)
            # Anything, such as too little memory: without this thread, all later requests would
            # wait for nothing, while the next ones may still fit. The log has the cause.
            except Exception:
                logging.getLogger(__name__).exception("an answer failed")
                self._fail(RunError("the computation failed; the server's log has the cause"))
        self._fail(Stopping("the server ends; try again later"))

    def _admit(self, answering: Answering) -> bool:
        """Wait for work; drop what is gone or too late; begin what fits. False: stopped."""
        with self._changed:
            while not (self._stopped or self._queue or self._jobs):
                self._changed.wait()
            now = time.monotonic()
            for job in [job for job in self._jobs.values() if job.is_gone or now > job.deadline]:
                answering.end(job.answer)
                job.answer.reason = "length"
                job.deliver(job.answer.speech.end(), None)
                self._jobs.pop(job.answer)
            for job in [job for job in self._queue if job.is_gone or now > job.deadline]:
                self._queue.remove(job)
                wait = f"the request waited for {self.seconds:g} s, which is the limit"
                job.deliver(Busy(f"{wait}; try again later", self._retry()))
            while self._queue and answering.free:
                job = self._queue.popleft()
                answering.add(job.answer)
                self._jobs[job.answer] = job
            return not self._stopped

    def _step(self, answering: Answering) -> None:
        """Compute one step without holding the lock, and deliver what is new."""
        deliveries = []
        changed = answering.step()
        with self._changed:
            for answer in changed:
                job = self._jobs[answer]
                pieces: list[str | Exception | None] = []
                text = answer.take()
                if text:
                    pieces.append(text)
                if answer.reason:
                    pieces.append(answer.error)  # None: the end
                    self._jobs.pop(answer)
                    self._mean += RECENT * (time.monotonic() - job.begun - self._mean)
                deliveries.append((job, pieces))
        for job, pieces in deliveries:
            if pieces:
                job.deliver(*pieces)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            for job in self._jobs.values():
                job.deliver(error)
            self._jobs.clear()
            if self._stopped:
                for job in self._queue:
                    job.deliver(error)
                self._queue.clear()
