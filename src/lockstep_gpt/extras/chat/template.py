"""A conversation as token ids: each message is a marker of its role, its text, and an end.

The markers are special tokens, which no text contains: a message can't pretend to be another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep_gpt.data.data_settings import DataConfig, data_class
from lockstep_gpt.data.tokenizer import ByteTokenizer, Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.datasets.mixture import Mixture

ROLES = ("system", "user", "assistant")
END = "<|end|>"
OURS = (*(f"<|{role}|>" for role in ROLES), END)
BEGIN_OF_MESSAGE = "<|im_start|>"  # ChatML's
END_OF_MESSAGE = "<|im_end|>"  # ChatML's
FIRST_BYTE = 0xF8  # from here on, no byte is part of valid UTF-8


@dataclass(frozen=True)
class Template:
    """How a tokenizer's conversations are written; `template_of` builds it.

    Args:
        tokenizer: encodes the texts.
        openings: role -> the ids that begin its message.
        end: the id that ends a message.
        between: the ids after it, before the next message.
        strips: whether white space around a text is removed, as it could join with the opening.
    """

    tokenizer: Tokenizer
    openings: dict[str, list[int]]
    end: int
    between: list[int] = field(default_factory=list)
    strips: bool = False

    @property
    def stop(self) -> frozenset[int]:
        """The ids that end an answer: of a message, and of a document."""
        last = self.tokenizer.end_of_text
        if last is None:
            return frozenset({self.end})
        return frozenset({self.end, last})

    def plain(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens in it stay text."""
        if self.strips:
            text = text.strip()
        ids: list[int] = self.tokenizer.encode(text).tolist()
        return ids

    def render(self, messages: Sequence[Mapping[str, str]], reply: bool) -> list[int]:
        """Return the ids of a conversation, whose messages have a `role` and a `content`.

        With `reply`, they end with the opening of the assistant's answer.

        Raises:
            UserError: a role is not one of `ROLES`, or a text can't be encoded.
        """
        ids: list[int] = []
        for message in messages:
            opening = self.openings[check_role(message["role"])]
            ids += [*opening, *self.plain(message["content"]), self.end, *self.between]
        if reply:
            ids += self.openings["assistant"]
        return ids


def has_chat(data: DataConfig) -> bool:
    """Tell whether some of the data is conversations, also if it is a part of a mixture."""
    kinds = [data.kind]
    if isinstance(data, Mixture):
        targets = [values.get("_target_", "") for values in data.sources.values()]
        kinds += [data_class(target).kind for target in targets]
    return "chat" in kinds


def check_role(role: Any) -> str:
    """Return `role`; raise a `UserError` if it is unknown."""
    if role not in ROLES:
        raise UserError(f"role {role!r} is not one of {', '.join(ROLES)}; rename it")
    return str(role)


def template_of(tokenizer: Tokenizer) -> Template:
    """Return the template of a tokenizer: our markers, or else ChatML's.

    Raises:
        UserError: the tokenizer has neither.
    """
    ids = markers_of(tokenizer)
    if all(marker in ids for marker in OURS):
        openings = {role: [ids[f"<|{role}|>"]] for role in ROLES}
        return Template(tokenizer, openings, ids[END])
    if BEGIN_OF_MESSAGE in ids and END_OF_MESSAGE in ids:
        start = ids[BEGIN_OF_MESSAGE]
        heads = {role: [start, *tokenizer.encode(f"{role}\n").tolist()] for role in ROLES}
        newline = tokenizer.encode("\n").tolist()
        return Template(tokenizer, heads, ids[END_OF_MESSAGE], newline, strips=True)
    raise UserError(
        f"the tokenizer has no special tokens for a chat, such as {OURS[0]}; give a model that was "
        "trained with data=chat"
    )


def markers_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of a tokenizer: content -> id."""
    values = tokenizer.to_dict()
    if values["kind"] == ByteTokenizer.kind:
        return {marker: FIRST_BYTE + place for place, marker in enumerate(OURS)}
    added = json.loads(values.get("json", "{}")).get("added_tokens", [])
    return {token["content"]: token["id"] for token in added if token["special"]}
