"""A conversation that is longer than the context: what is left out, and which models can chat."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep_gpt.config import Config
from lockstep_gpt.data.tokenizer import ByteTokenizer, Tokenizer
from lockstep_gpt.errors import UserError
from lockstep_gpt.extras.chat.template import Template, has_chat, template_of

ANSWER_SHARE = 4  # a conversation is cut so that 1 / ANSWER_SHARE of the context is for the answer
Message = dict[str, str]


def chat_template(tokenizer: Tokenizer, config: Config) -> Template:
    """Return the template of a model that was trained on conversations.

    Raises:
        UserError: it was not.
    """
    template = template_of(tokenizer)
    if isinstance(tokenizer, ByteTokenizer) and not has_chat(config.data):
        raise UserError(
            f"this model was trained on data={config.data.kind}, not on conversations; use "
            "generate, or fine-tune it with experiment=chat"
        )
    return template


def fitted(messages: Sequence[Message], template: Template, size: int) -> tuple[list[int], int]:
    """Return the ids to answer, and how many of the oldest messages were left out to fit `size`.

    The first message stays if it is the system's. A quarter of `size` stays free for the answer;
    if only the newest message is left, one token.

    Raises:
        UserError: the newest message alone doesn't fit.
    """
    begin = 1 if messages and messages[0]["role"] == "system" else 0
    sizes = [len(template.render([each], reply=False)) for each in messages]
    fixed = sum(sizes[:begin]) + len(template.render([], reply=True))
    room = size - max(1, size // ANSWER_SHARE)
    first, last, needed = begin, len(messages) - 1, fixed + sum(sizes[begin:])
    while first < last and (needed > room or (first > begin and _is_answer(messages[first]))):
        needed -= sizes[first]
        first += 1
    if needed >= size:
        with_system = " with the system's message" if begin else ""
        raise UserError(
            f"the newest message{with_system} has {needed} tokens, and the context is "
            f"model.block_size={size}; shorten it"
        )
    return template.render([*messages[:begin], *messages[first:]], reply=True), first - begin


def _is_answer(message: Message) -> bool:
    """Tell whether a message is left out with the one before, which it answers."""
    return message["role"] == "assistant"
