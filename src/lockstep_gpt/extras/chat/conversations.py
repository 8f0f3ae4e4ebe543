"""`data=chat`: files with a conversation per line, each a document."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lockstep_gpt.data.sources.files import File, Files, find_files
from lockstep_gpt.data.sources.source import (
    Position,
    Source,
    TargetMask,
    TokenBlock,
    split_of_name,
)
from lockstep_gpt.data.tokenizer import Tokenizer, Tokens, token_dtype
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.export_files import chat_files
from lockstep_gpt.extras.chat.template import Template, check_role, template_of
from lockstep_gpt.extras.chat.tokenizers import chat_tokenizer
from lockstep_gpt.settings import counted, setting

logger = logging.getLogger(__name__)

WANTED = r"\.(jsonl|ndjson|json)$"  # names of a folder's files
TOGETHER = 1024  # conversations that are encoded at once
NAMES = {"human": "user", "gpt": "assistant"}  # other names of roles
FORMS = "messages, conversations, or prompt and completion"
Messages = list[dict[str, str]]


@dataclass
class Conversations(Source):
    """Conversations; only the assistant's messages are learned."""

    kind: ClassVar[str] = "chat"
    added_later: ClassVar[frozenset[str]] = Source.added_later | {"shard_mb"}
    held_out: ClassVar[Any] = "whole conversations"  # their text decides

    path: str = setting(
        "a file with a JSON object per line, or a folder of such files", "", on_resume="machine"
    )
    tokenizer: str = setting(
        "bytes; or the run, checkpoint, or folder (with tokenizer.json) whose tokenizer to use",
        "bytes",
    )
    longest: int | None = setting(
        "tokens per conversation at most; the rest is cut; null: no limit",
        None,
        at_least=16,
    )

    @cached_property
    def listing(self) -> Files:
        """The files; raises a `UserError` if none is usable."""
        place = Path(self.path).expanduser()
        if place.is_file():
            return find_files(self.path)
        try:
            return find_files(self.path, WANTED)
        except UserError:
            if self.path and place.is_dir():
                raise UserError(
                    f"data.path={self.path} has no file *.jsonl, *.ndjson, *.json; give one"
                ) from None
            raise

    @property
    def files(self) -> list[File]:
        """The files, in the order in which they are read."""
        return self.listing.files

    @property
    def size(self) -> int | None:
        """The bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def template(self) -> Template:
        """How conversations are written as tokens."""
        return template_of(chat_tokenizer(self.tokenizer))

    def identity(self) -> Any:
        """Return the identity of the files."""
        return self.listing.identity()

    def tokenizer_identity(self) -> Any:
        """Return a digest of the whole tokenizer."""
        values = json.dumps(self.template.tokenizer.to_dict(), sort_keys=True)
        return ["chat", hashlib.sha256(values.encode()).hexdigest()]

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which has special tokens for a chat."""
        return self.template.tokenizer

    def target_masks(self, tokenizer: Tokenizer) -> dict[str, TargetMask]:
        """Return which targets count: those of answers."""
        from lockstep_gpt.extras.chat.answers_only import answer_mask  # needs torch

        template = template_of(tokenizer)
        return {"": lambda tokens, targets: answer_mask(tokens, targets, template)}

    def files_of_export(self, tokenizer: Tokenizer, files: dict[str, Any]) -> dict[str, Any]:
        """Return the files that have the chat template."""
        return chat_files(tokenizer, files)

    def blocks(self, start: Position) -> Iterator[TokenBlock]:
        """Yield the conversations as tokens; then say how many were cut."""
        texts = islice(self._texts(), start.offset, None)
        after = start
        cut = 0
        while batch := [*islice(texts, TOGETHER)]:
            read = after.read + sum(map(len, batch))
            after = Position(0, after.offset + len(batch), read)
            names = [split_of_name(text, self.val_fraction, self.test_fraction) for text in batch]
            for split in sorted(set(names)):
                chosen = [text for text, name in zip(batch, names, strict=True) if name == split]
                rows = [self.template.render(json.loads(text), reply=False) for text in chosen]
                cut += sum(self.longest is not None and len(row) > self.longest for row in rows)
                size = sum(len(text.encode()) for text in chosen)
                yield TokenBlock(after, split, self._joined(rows), len(rows), size)
        if cut:
            longer = f"{cut:,} of {counted(after.offset - start.offset, 'conversation')}"
            logger.warning(
                "%s: %s are cut at the end, after data.longest=%d tokens",
                self.path,
                longer,
                self.longest,
            )

    def _texts(self) -> Iterator[str]:
        """Yield the conversations of all files as JSON."""
        for file in self.files:
            yield from _read(file, self.listing.open)

    def _joined(self, rows: list[list[int]]) -> Tokens:
        """Return the ids of conversations one after another, each followed by the end of text."""
        end = self.template.tokenizer.end_of_text
        ids = chain.from_iterable([*row[: self.longest], end] for row in rows)
        return np.fromiter(ids, token_dtype(self.template.tokenizer.vocab_size))


def _read(file: File, opened: Any) -> Iterator[str]:
    """Yield the conversations of a file as JSON; a `UserError` names the line with a mistake."""
    try:
        with opened(file.path, "rb") as lines:
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
        reason = getattr(error, "msg", str(error))
        column = getattr(error, "colno", 1)
        raise UserError(
            f"{where} is not JSON ({reason} at column {column}); write one object per line, or "
            "remove the line"
        ) from None
    try:
        messages = [*_messages(value)]
        if not messages:
            raise UserError("is an empty conversation; add one, or remove the line")
        if not any(message["role"] == "assistant" for message in messages):
            raise UserError("has no answer by the assistant; add one, or remove the line")
    except UserError as error:
        raise UserError(f"{where} {error}") from None
    return messages


def _messages(value: Any) -> Iterator[dict[str, str]]:
    """Yield the messages of a line's value in any of the `FORMS`."""
    if not isinstance(value, dict):
        value = {}  # which the last branch rejects
    if "messages" in value:
        yield from _messages_of_list(value["messages"], "role", "content")
    elif "conversations" in value:
        yield from _messages_of_list(value["conversations"], "from", "value")
    elif "prompt" in value and "completion" in value:
        for role, name in (("user", "prompt"), ("assistant", "completion")):
            if isinstance(value[name], list):
                yield from _messages_of_list(value[name], "role", "content")
            else:
                yield {"role": role, "content": _text(value[name], name)}
    else:
        raise UserError(f"is not an object with {FORMS}; name its fields so, or remove the line")


def _messages_of_list(messages: Any, role: str, content: str) -> Iterator[dict[str, str]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UserError("has messages that are not a list of objects; write them so")
    for message in messages:
        name = message.get(role)
        if isinstance(name, str):
            name = NAMES.get(name, name)
        yield {"role": check_role(name), "content": _text(message.get(content), content)}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"has a message whose {name} is not text; write it as a string")
    if "\0" in value:
        raise UserError("has a message with a NUL, which ends a document; remove it")
    return value
