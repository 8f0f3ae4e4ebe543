"""`data=chat`: files with a conversation per line, each a document."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from lockstep_gpt.config import UserError, counted
from lockstep_gpt.data.corpora import File, Stretch, TextFiles, split_of
from lockstep_gpt.data.tokenizer import Tokenizer, Tokens, token_dtype
from lockstep_gpt.extras.chat.chat_settings import ChatData
from lockstep_gpt.extras.chat.template import Template, check_role, template_of
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer

logger = logging.getLogger(__name__)

ENDINGS = (".jsonl", ".ndjson", ".json")
TOGETHER = 1024  # conversations that are encoded at once
NAMES = {"human": "user", "gpt": "assistant"}  # other names of roles
FORMS = "messages, conversations, or prompt and completion"
Messages = list[dict[str, str]]


class Conversations(TextFiles):
    """The conversations of a file or a folder; their text decides whether they are held out."""

    def __init__(self, config: ChatData) -> None:
        super().__init__(config, config.path, by_name=True)  # type: ignore[arg-type]
        self.config = config
        self.template = template_of(chat_tokenizer(config.tokenizer))
        values = json.dumps(self.template.tokenizer.to_dict(), sort_keys=True)
        self.tokenizer_identity = ["chat", hashlib.sha256(values.encode()).hexdigest()]
        self.writer = ConversationWriter(self.template, config.longest)

    @property
    def held_out(self) -> str:
        """Say what the validation split consists of."""
        return "whole conversations"

    def find(self) -> list[File]:
        """Find the files, in no set order, or raise a `UserError` if none is usable."""
        found = super().find()
        if Path(self.path).expanduser().is_file():
            return found
        if wanted := [file for file in found if file.name.endswith(ENDINGS)]:
            return wanted
        raise UserError(f"data.path={self.path} has no file *{', *'.join(ENDINGS)}; give one")

    def make_tokenizer(self) -> Tokenizer:
        """Return what writes conversations as tokens."""
        return self.writer

    def stretches(self) -> Iterator[Stretch]:
        """Yield the conversations, each as JSON; then say how many were cut."""
        self.writer.cut = 0
        texts, count = chain.from_iterable(map(_read, self.files)), 0
        while together := [*islice(texts, TOGETHER)]:
            count += len(together)
            for split in ("train", "val"):
                fraction = self.config.val_fraction
                chosen = [text for text in together if split_of(text, fraction) == split]
                if chosen:
                    yield Stretch(split, [text.encode() for text in chosen])
        if self.writer.cut:
            longer = f"{self.writer.cut:,} of {counted(count, 'conversation')}"
            logger.warning(
                "%s: %s are cut at the end, after data.longest=%d tokens",
                self.config.path,
                longer,
                self.config.longest,
            )


class ConversationWriter:
    """Encodes conversations, given as JSON, with a template; is its tokenizer in all else."""

    def __init__(self, template: Template, longest: int | None) -> None:
        self.template, self.longest = template, longest
        self.vocab_size = template.tokenizer.vocab_size
        self.end_of_text = template.tokenizer.end_of_text
        self.cut = 0  # conversations longer than `longest` so far

    def encode(self, text: str | bytes) -> Tokens:
        """Return the ids of plain text."""
        return self.template.tokenizer.encode(text)

    def encode_documents(self, texts: Sequence[bytes]) -> Tokens:
        """Return the ids of conversations one after another, each followed by the end of text."""
        rows = [self.template.render(json.loads(text), reply=False) for text in texts]
        self.cut += sum(self.longest is not None and len(row) > self.longest for row in rows)
        ids = chain.from_iterable([*row[: self.longest], self.end_of_text] for row in rows)
        return np.fromiter(ids, token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`."""
        return self.template.tokenizer.decode(ids)

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the template's tokenizer, which a run uses."""
        return self.template.tokenizer.to_dict()


def _read(file: File) -> Iterator[str]:
    """Yield the conversations of a file as JSON; a `UserError` names the line with a mistake."""
    try:
        with Path(file.path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if text.strip():
                    yield json.dumps(messages_of(text, f"{file.path}:{number}"))
    except OSError as error:
        raise UserError(f"{file.path} cannot be read: {error.strerror}; fix it") from error


def messages_of(line: bytes, where: str) -> Messages:
    """Return the messages of one line, each with `role` and `content`.

    Raises:
        UserError: the line isn't a conversation; the message starts with `where`.
    """
    try:
        value = json.loads(line.decode().strip())
    except UnicodeDecodeError:
        raise UserError(f"{where} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        found = getattr(error, "msg", str(error)), getattr(error, "colno", 1)
        raise UserError(
            f"{where} is not JSON ({found[0]} at column {found[1]}); write one object per line, or "
            "remove the line"
        ) from None
    try:
        messages = [*_messages(value)]
        if not any(each["role"] == "assistant" for each in messages):
            reason = "has no answer by the assistant" if messages else "is an empty conversation"
            raise UserError(f"{reason}; add one, or remove the line")
    except UserError as error:
        raise UserError(f"{where} {error}") from None
    return messages


def _messages(value: Any) -> Iterator[dict[str, str]]:
    """Yield the messages of a line's value in any of the `FORMS`."""
    value = value if isinstance(value, dict) else {}
    if "messages" in value:
        yield from _each(value["messages"], "role", "content")
    elif "conversations" in value:
        yield from _each(value["conversations"], "from", "value")
    elif "prompt" in value and "completion" in value:
        for role, name in (("user", "prompt"), ("assistant", "completion")):
            if isinstance(value[name], list):
                yield from _each(value[name], "role", "content")
            else:
                yield {"role": role, "content": _text(value[name], name)}
    else:
        raise UserError(f"is not an object with {FORMS}; name its fields so, or remove the line")


def _each(messages: Any, role: str, content: str) -> Iterator[dict[str, str]]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UserError("has messages that are not a list of objects; write them so")
    for each in messages:
        name = each.get(role)
        known = check_role(NAMES.get(name, name) if isinstance(name, str) else name)
        yield {"role": known, "content": _text(each.get(content), content)}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"has a message whose {name} is not text; write it as a string")
    if "\0" in value:
        raise UserError("has a message with a NUL, which ends a document; remove it")
    return value
