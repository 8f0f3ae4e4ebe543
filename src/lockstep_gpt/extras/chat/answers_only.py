"""Which targets of a conversation count: the assistant's texts and the ends of its messages.

This depends only on the tokens of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep_gpt.extras.chat.template import Template


def answer_mask(tokens: Tensor, targets: Tensor, template: Template) -> Tensor:
    """Return which of `targets` belong to an answer or are its end; all are (B, T).

    Before the first opening in a row, it is unknown whose message continues: nothing counts there.
    """
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    end_of_text = template.tokenizer.end_of_text
    starts = {opening[0] for opening in template.openings.values()}
    begun = _last_place(_ends_of(tokens, template.openings["assistant"]), place)
    ended = _last_place(_is_any_of(tokens, {template.end, end_of_text, *starts}), place)
    inside = (begun >= ended) & (begun >= 0)
    return inside & ~_is_any_of(targets, {end_of_text, *starts})


def _is_any_of(ids: Tensor, wanted: set[int | None]) -> Tensor:
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for token in wanted:
        mask |= ids == token
    return mask


def _ends_of(ids: Tensor, opening: list[int]) -> Tensor:
    """Return where `opening` ends."""
    mask = ids == opening[-1]
    for back, token in enumerate(reversed(opening[:-1]), 1):
        mask[:, back:] &= ids[:, :-back] == token
        mask[:, :back] = False
    return mask


def _last_place(mask: Tensor, place: Tensor) -> Tensor:
    """Return the last place so far at which `found` is true; -1 if there is none."""
    return place.where(mask, -1).cummax(dim=1).values
