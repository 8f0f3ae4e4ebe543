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


def fit_to_context(
    messages: Sequence[Message], template: Template, size: int
) -> tuple[list[int], int]:
    """Return the ids to answer, and how many of the oldest messages were left out to fit `size`.

    The first message stays if it is the system's. A quarter of `size` stays free for the answer;
    if only the newest message is left, one token.

    Raises:
        UserError: the newest message alone doesn't fit.
    """
    fixed_count = 0  # messages that stay in any case
    if messages and messages[0]["role"] == "system":
        fixed_count = 1
    sizes = [len(template.render([message], reply=False)) for message in messages]
    room = size - max(1, size // ANSWER_SHARE)
    needed = sum(sizes) + len(template.render([], reply=True))
    first = fixed_count
    last = len(messages) - 1
    while first < last:
        # An answer isn't left without the message before it.
        lacks_question = first > fixed_count and messages[first]["role"] == "assistant"
        if needed <= room and not lacks_question:
            break
        needed -= sizes[first]
        first += 1
    if needed >= size:
        with_system = " with the system's message" if fixed_count else ""
        raise UserError(
            f"the newest message{with_system} has {needed} tokens, and the context is "
            f"model.block_size={size}; shorten it"
        )
    ids = template.render([*messages[:fixed_count], *messages[first:]], reply=True)
    return ids, first - fixed_count
