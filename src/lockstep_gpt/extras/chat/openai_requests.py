"""Requests in the form of OpenAI's API: what is supported, and the check of each parameter."""

from __future__ import annotations

import json
import secrets
from typing import Any, NoReturn

from lockstep_gpt.data.tokenizer import Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.answering import Answer
from lockstep_gpt.extras.chat.history import fit_to_context
from lockstep_gpt.extras.chat.openai_api import ApiError, Request, refuse
from lockstep_gpt.extras.chat.sampling import Sampling
from lockstep_gpt.extras.chat.speech import Speech
from lockstep_gpt.extras.chat.template import Template

DEFAULT_LENGTH = 16  # tokens of a completion without max_tokens, as in OpenAI's API
MOST_STOPS = 4  # stop sequences of a request, as in OpenAI's API
LONGEST_STOP = 1000  # characters
# Parameters that we don't have, with the values that mean nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# Parameters about the caller, which don't change an answer.
ABOUT_CALLER = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
ROLE_NAMES = {"developer": "system"}  # OpenAI's newer name


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request."""
    try:
        values = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error}); send a JSON object") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not a JSON object; send one")
    return {name: value for name, value in values.items() if value is not None}


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


class Reader:
    """Turns bodies into requests to one model.

    Args:
        name: of the model.
        tokenizer: of the model.
        template: of its conversations; or why it has none.
        block_size: tokens of its context.
        longest: most tokens of an answer.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: Template | UserError,
        block_size: int,
        longest: int,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.block_size = block_size
        self.longest = longest

    def chat(self, values: dict[str, Any]) -> Request:
        """Return the request of a body of /v1/chat/completions."""
        if isinstance(self.template, UserError):
            raise ApiError(400, f"{self.template}; /v1/completions works", code="no_chat_template")
        messages = _messages(values.pop("messages", None))
        truncation = _choice(values, "truncation", ("disabled", "auto"))
        left_out = None
        if truncation == "auto":
            prompt, left_out = fit_to_context(messages, self.template, self.block_size)
        else:
            prompt = self.template.render(messages, reply=True)
            self._check_length(prompt, "messages", "; send fewer, or set truncation to auto")
        request = self._request(values, prompt, "chat.completion", self.template.stop, self.longest)
        request.left_out = left_out
        return request

    def completion(self, values: dict[str, Any]) -> Request:
        """Return the request of a body of /v1/completions."""
        prompt = self._prompt(values.pop("prompt", None))
        self._check_length(prompt, "prompt", "; shorten it")
        end = self.tokenizer.end_of_text
        stops: frozenset[int] = frozenset()
        if end is not None:
            stops = frozenset([end])
        return self._request(values, prompt, "text_completion", stops, DEFAULT_LENGTH)

    def _prompt(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids: list[int] = self.tokenizer.encode(prompt).tolist()
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            ids = prompt
            if not all(0 <= token < self.tokenizer.vocab_size for token in ids):
                refuse("prompt", f"has ids that are not from 0 to {self.tokenizer.vocab_size - 1}")
        else:
            refuse("prompt", "must be one text, or one list of token ids")
        if not ids:
            refuse("prompt", "is empty; give at least one token")
        return ids

    def _check_length(self, prompt: list[int], param: str, remedy: str) -> None:
        if len(prompt) >= self.block_size:
            rule = (
                f"has {len(prompt)} tokens, and the context is {self.block_size}, with the answer"
            )
            refuse(param, f"{rule}{remedy}", "context_length_exceeded")

    def _request(
        self,
        values: dict[str, Any],
        prompt: list[int],
        kind: str,
        stops: frozenset[int],
        length: int,
    ) -> Request:
        """Read all other parameters; unknown ones are refused."""
        model = values.pop("model", self.name)
        if model != self.name:
            raise ApiError(404, f"model {model!r} is not {self.name}", "model", "model_not_found")
        names = [name for name in ("max_completion_tokens", "max_tokens") if name in values]
        limits = [_number(values, name, int, 1, self.longest) for name in names]
        sampling = Sampling(
            temperature=_number(values, "temperature", float, 0, 2, 1.0),
            top_k=_number(values, "top_k", int, 1, 2**31),
            top_p=_number(values, "top_p", float, 0, 1, 1.0),
            seed=_number(values, "seed", int, 0, 2**63 - 1, secrets.randbelow(2**63)),
        )
        speech = Speech(self.tokenizer, _stops(values))
        stream = _choice(values, "stream", (False, True))
        options = values.pop("stream_options", {})
        if not isinstance(options, dict) or (options and not stream):
            refuse("stream_options", "must be an object, and needs stream=true")
        usage = _choice(options, "include_usage", (False, True))
        _refuse_rest(values)
        limit = min(limits or [length, self.longest])
        answer = Answer(prompt, limit, speech, sampling, stops)
        return Request(answer, kind, self.name, bool(stream), bool(usage))


def _messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        refuse("messages", "must be a list of at least one message")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        refuse(name, "must be an object with role and content")
    content = message.get("content")
    if isinstance(content, list):  # parts, of which we know text
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        known = len(parts) == len(content) and all(isinstance(part, str) for part in parts)
        content = "".join(map(str, parts)) if known else None
    role = message.get("role")
    if not isinstance(content, str) or not isinstance(role, str):
        refuse(name, "must have a role, and a content that is text")
    for key, value in message.items():
        if key not in ("role", "content") and value:
            refuse(f"{name}.{key}", "is not supported; leave it out")
    return {"role": ROLE_NAMES.get(role, role), "content": content}


def _number(
    values: dict[str, Any], name: str, kind: type, least: float, most: float, default: Any = None
) -> Any:
    value = values.pop(name, default)
    types: tuple[type, ...] = (int,)
    noun = "an integer"
    if kind is float:
        types = (int, float)
        noun = "a number"
    # Not isinstance: true is no number.
    if value is not None and (type(value) not in types or not least <= value <= most):
        refuse(name, f"must be {noun} from {least} to {most}")
    return value


def _choice(values: dict[str, Any], name: str, choices: tuple[Any, ...]) -> Any:
    """Return one of `choices`, of which the first is the default."""
    value = values.pop(name, choices[0])
    if not any(value is choice or (value == choice and type(value) is str) for choice in choices):
        refuse(name, f"must be {' or '.join(map(json.dumps, choices))}")
    return value


def _stops(values: dict[str, Any]) -> list[str]:
    stops = values.pop("stop", [])
    if isinstance(stops, str):
        stops = [stops]
    fits = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not fits or not all(map(_is_stop, stops)):
        rule = f"must be up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters"
        refuse("stop", rule)
    return list(stops)


def _is_stop(stop: Any) -> bool:
    return isinstance(stop, str) and 0 < len(stop) <= LONGEST_STOP


def _refuse_rest(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            refuse(name, "is not supported; leave it out")
        if name not in NEUTRAL and name not in ABOUT_CALLER:
            refuse(name[:80], "is not a parameter that this server knows; leave it out")
