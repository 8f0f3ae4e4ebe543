"""Responses and errors in the form of OpenAI's API."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lockstep_gpt.extras.chat.answering import Answer


class ApiError(Exception):
    """An error in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = {429: "rate_limit_error"}.get(status, kind)
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def refuse(param: str, rule: str, code: str | None = None) -> NoReturn:
    """Raise the error for an invalid parameter."""
    raise ApiError(400, f"{param} {rule}", param, code)


@dataclass
class Request:
    """A checked request, and the form of its response."""

    answer: Answer
    kind: str  # "chat.completion" or "text_completion"
    model: str
    stream: bool
    include_usage: bool
    left_out: int | None = None  # messages; None if none may be
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it continues a conversation."""
        return self.kind == "chat.completion"

    def _about(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        about: dict[str, Any] = {"id": f"{prefix}-{self.id}", "object": kind}
        about |= {"created": self.created, "model": self.model}
        if self.left_out is not None:
            about["left_out"] = self.left_out
        return about

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else self.kind

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompt = len(self.answer.prompt)
        answer = len(self.answer.ids)
        numbers = {"prompt_tokens": prompt, "completion_tokens": answer}
        return {**numbers, "total_tokens": prompt + answer}

    def full_response(self, text: str) -> dict[str, Any]:
        """Return the response with all of the answer."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self.answer.reason}
        return {**self._about(self.kind), "choices": [choice], "usage": self.usage()}

    def chunk(self, text: str, first: bool = False, last: bool = False) -> dict[str, Any]:
        """Return one event of a streamed response."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            delta = {}
            if first:
                delta["role"] = "assistant"
            if text or first:
                delta["content"] = text
            content = {"delta": delta}
        reason = self.answer.reason if last else None
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {**self._about(self._chunk_kind), "choices": [choice]}

    def last_chunk(self) -> dict[str, Any]:
        """Return the event with the numbers of tokens."""
        return {**self._about(self._chunk_kind), "choices": [], "usage": self.usage()}
